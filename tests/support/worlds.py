"""Worlds without a process group: a single rank, and one rank of several whose other ranks a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.world import Exchange, World

T = TypeVar("T")


def world_of(rank: int = 0, size: int = 1, device: str | torch.device = "cpu") -> World:
    """The world of one rank on one machine. Its collectives work for `size=1` only."""
    device = torch.device(device)
    return World(rank, rank, size, device, "gloo" if device.type == "cpu" else "nccl")


def fake_world(
    rank: int = 0,
    size: int = 1,
    *,
    gathered: Callable[[Any], list[Any]] | None = None,
    exchanged: Callable[..., list[int]] | None = None,
    on_decision: Callable[[], None] = lambda: None,
) -> FakeWorld:
    """A world whose collectives return at once.

    `gathered` computes what the ranks hold, in rank order, from what this rank holds; by default all hold the same.
    `exchanged` computes the result of an exchange from the numbers of this rank; by default no rank has larger ones.
    `on_decision` is called when a decision is made, which is when the other ranks continue.
    """
    return FakeWorld(
        rank, rank, size, torch.device("cpu"), "gloo",
        gathered=gathered or (lambda mine: [mine] * size), exchanged=exchanged or (lambda *mine: list(mine)),
        on_decision=on_decision,
    )  # fmt: skip


@dataclass(frozen=True)
class FakeWorld(World):
    """See `fake_world`."""

    gathered: Callable[[Any], list[Any]] = lambda mine: [mine]
    exchanged: Callable[..., list[int]] = lambda *mine: list(mine)
    on_decision: Callable[[], None] = lambda: None

    def decide(self, choose: Callable[[], T]) -> T:
        chosen = choose()
        self.on_decision()
        return chosen

    def gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.gathered(tensor)

    def gather_objects(self, thing: T) -> list[T]:
        return self.gathered(thing)

    def shared_sum(self) -> None:
        return None

    def exchange(self, width: int | None = None) -> Exchange:
        return FakeExchange(self.exchanged)


class FakeExchange(Exchange):
    """Returns what `exchanged` computes from the numbers of this rank."""

    def __init__(self, exchanged: Callable[..., list[int]]) -> None:
        self._exchanged = exchanged

    def begin(self, *numbers: int) -> None:
        self._numbers = numbers

    def end(self) -> list[int]:
        return self._exchanged(*self._numbers)
