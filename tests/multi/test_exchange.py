"""Numbers and sums of ranks: through memory on one host, and by messages between hosts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import Trainer
from paceline import world as worlds
from paceline.engine.reduce import Reduction
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


def sums_of_ranks(world: World) -> list[torch.Tensor]:
    """Sums of gradients of several sizes and formats, of which some are larger than the memory for one round."""
    generator, summed = torch.Generator().manual_seed(world.rank), []
    for lanes in (2, 3):
        reduction = Reduction(world, lanes, exact=True)
        for size, dtype in ((5, torch.float64), (3_000_000, torch.float32), (300, torch.bfloat16)):
            if lanes == 3 and dtype == torch.bfloat16:
                continue
            buffer = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
            if lanes == 2 and world.rank == 2:  # has no lane
                buffer.fill_(-0.0)
            reduction.start([buffer], [], buffer, is_empty=False).wait()
            summed.append(buffer)
    return summed


def sum_in_both_ways(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> Any:
    """Whether sums by memory and by messages have equal bits, and the error about tensors of different sizes."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device, "gloo")
    shared = world.shared_sum()
    assert shared is not None
    by_memory = sums_of_ranks(world)
    worlds.shared_sum.create = lambda *_: None  # type: ignore[assignment]
    assert world.shared_sum() is None
    by_messages = sums_of_ranks(world)
    are_equal = [torch.equal(one, other) for one, other in zip(by_memory, by_messages, strict=True)]
    with pytest.raises(RuntimeError) as raised:
        shared.all_reduce(torch.zeros(1 + world.rank), torch.add)
    return world.gather_objects(are_equal), str(raised.value)


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


def test_sums_by_memory_have_the_bits_of_sums_by_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    are_equal, error = run(sum_in_both_ways)
    assert are_equal == [[True] * 5] * 3
    assert error == "the processes of this machine sum tensors of different sizes: [4, 8, 12] bytes"


def test_a_rank_that_was_killed_is_named_while_others_wait_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(paceline.errors.RankFailed, match=r"rank 1 on .*\n.*SIGKILL"):
        run(lose_rank_1)
