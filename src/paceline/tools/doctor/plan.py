"""The ranks that a run would have on this machine, according to the rules of the launcher."""

from __future__ import annotations

from typing import NamedTuple

from paceline.config import Config
from paceline.data.batches import lanes_of
from paceline.launch.machines import LocalMachine, capacity
from paceline.world import pick_backend, pick_device


class RankPlan(NamedTuple):
    """The ranks of a run on this machine."""

    ranks: int
    device: str
    backend: str


def plan_of(config: Config) -> RankPlan:
    """The ranks that a run would have here; a ConfigError if it could not start."""
    ranks = LocalMachine(config).ranks_for(config.lanes)
    device = pick_device(config.device, 0)
    backend = pick_backend(config.backend, device, ranks)
    lanes_of(0, ranks, config.lanes or ranks)
    return RankPlan(ranks, device.type, backend)


def most_ranks(config: Config) -> int:
    """The largest number of ranks that a run may have here, even if its lanes cannot be split over them."""
    return capacity(config)[1]
