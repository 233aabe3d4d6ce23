"""The further values that a step returns besides its loss, for each lane of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.data.lanes import RankLanes
from paceline.engine.losses import number_on, sum_and_count
from paceline.engine.objective import Objective
from paceline.errors import ConfigError
from paceline.world import World


class LaneValues:
    """The sum and the count of each further value in each lane; the first step of an attempt determines the names."""

    def __init__(self, rank_lanes: RankLanes, world: World, objective: Objective) -> None:
        self._lanes, self._world, self._source = rank_lanes, world, objective.key
        # A loss_fn has no further values, so its ranks do not have to agree on names.
        self.names: tuple[str, ...] | None = () if objective.key == "loss_fn" else None
        self.restart()

    def restart(self) -> None:
        """Reset the values before the lanes of a step."""
        self._of_lanes: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, lane: int, values: Mapping[str, Any], samples: int) -> None:
        """Keep the values of a lane, by its number; means are weighted by its samples."""
        unknown = [name for name in values if self.names is not None and name not in self.names]
        if unknown:
            raise ConfigError(
                f"{self._source} returned {unknown[0]!r}, which it did not return in the first step; return the same "
                "names in each step, with paceline.Sum(0, 0) if there is no value"
            )
        self._of_lanes[self._lanes.place_of(lane)] = {
            name: self._pair(name, value, samples) for name, value in values.items()
        }

    def _pair(self, name: str, value: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        device, source = self._world.device, f"{self._source}'s {name}"
        is_tensor = isinstance(value[0] if isinstance(value, (tuple, list)) and value else value, torch.Tensor)
        if not is_tensor and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"{source} is a number on the host, which the replay of a CUDA graph would repeat; return a tensor"
            )
        total, count = sum_and_count(_detached(value), samples, source)
        return number_on(total, device), number_on(count, device)

    def finish(self) -> list[torch.Tensor]:
        """The sum and the count of each lane, for each name in order. All ranks.

        At the first call, the ranks agree on the names.
        """
        if self.names is None:
            mine = [name for index in sorted(self._of_lanes) for name in self._of_lanes[index]]
            self.names = tuple(dict.fromkeys(name for names in self._world.gather_objects(mine) for name in names))
        zero = number_on(0, self._world.device)
        lanes = [self._of_lanes.get(index, {}) for index in range(self._lanes.most)]
        return [number for name in self.names for lane in lanes for number in lane.get(name, (zero, zero))]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        parts = [_detached(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
