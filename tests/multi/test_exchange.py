"""The exchange of numbers between ranks: from memory on one host, and by messages between hosts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import paceline
from paceline import Trainer
from paceline import world as worlds
from paceline.world import World


def exchange_in_every_order(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> Any:
    """The results of exchanges that are begun, met and ended in turn, by memory and by messages."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device, "gloo")
    by_memory = world.exchange()
    worlds._shared_numbers = lambda *_: None
    by_messages, is_used = world.exchange(), []
    results = []
    for exchange in (by_memory, by_messages):
        is_used.append(exchange._shared is not None)
        found: list[Any] = []
        for turn in range(50):
            if turn % 7 == world.rank:
                time.sleep(0.001)  # another rank is the last one in other turns
            exchange.begin(turn * (world.rank == 1), -world.rank)
            if turn % 3:
                found.append(exchange.meet(world.rank + turn))
            if turn % 3 == 2:
                found.append(exchange.meet(5, 6, 7))
            found.append(exchange.end())
        results.append(found)
    return is_used, results


def lose_rank_1(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None:
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device, "gloo")
    exchange = world.exchange()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.meet(1)


def run(train_fn: Any) -> Any:
    trainer = Trainer(lambda: nn.Linear(1, 1), lambda: list(range(40)), train_fn=train_fn, procs=3)
    return trainer.start().value


def test_ranks_get_the_largest_numbers_by_memory_and_by_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    is_by_memory, (by_memory, by_messages) = run(exchange_in_every_order)
    assert is_by_memory == [True, False]
    wanted: list[list[int]] = []
    for turn in range(50):
        wanted += [[2 + turn]] if turn % 3 else []
        wanted += [[5, 6, 7]] if turn % 3 == 2 else []
        wanted.append([turn, 0])
    assert by_memory == by_messages == wanted


def test_a_rank_that_was_killed_is_named_while_others_wait_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(paceline.errors.RankFailed, match=r"rank 1 on .*\n.*SIGKILL"):
        run(lose_rank_1)
