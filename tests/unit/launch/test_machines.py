"""How many ranks a run gets on this machine. What the launcher does with them is tested in tests/multi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.config import Config
from paceline.launch import machines
from paceline.launch.machines import LocalMachine

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("keys", "lanes", "gpus", "cores", "ranks"),
    [
        ({}, None, 0, 8, 1),  # without a GPU, one rank unless more are asked for
        ({}, None, 4, 8, 4),
        ({"device": "cpu"}, None, 4, 8, 1),
        ({"procs": 3}, None, 0, 8, 3),
        ({"procs": 6}, None, 4, 2, 6),  # a fixed number is used whatever the capacity
        ({"procs": "1:4"}, None, 0, 8, 4),
        ({"procs": "1:4"}, None, 0, 2, 2),
        ({"procs": "1:4"}, None, 3, 8, 3),
        ({"procs": "1:4", "device": "cpu"}, None, 3, 8, 4),
        ({"procs": "3:4"}, None, 0, 2, 3),  # never fewer than the minimum
        ({"procs": "1:4"}, 6, 0, 8, 4),
        ({"procs": "1:8"}, 8, 0, 5, 5),
        ({"procs": "1:4"}, 3, 0, 8, 3),  # a lane for each
        ({}, 4, 3, 8, 3),  # a run that is resumed with one GPU less
        ({}, 4, 8, 8, 4),
        ({"ddp": False}, None, 4, 8, 1),
        ({"ddp": False, "procs": "1:4"}, None, 0, 8, 1),
    ],
)
def test_the_number_of_ranks_follows_from_capacity_and_lanes(
    keys: dict[str, Any], lanes: int | None, gpus: int, cores: int, ranks: int,
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(machines, "usable_cores", lambda: cores)
    assert LocalMachine(make_config(**keys)).ranks_for(lanes) == ranks


def test_lanes_that_no_number_in_the_range_divides_are_refused_later(make_config: MakeConfig) -> None:
    assert LocalMachine(make_config(procs=4)).ranks_for(6) == 4
