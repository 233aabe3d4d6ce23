"""The values that the user's own loop logs in batches: kept on the device, then averaged over lanes and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch

from paceline.data.lanes import Lane
from paceline.errors import ConfigError
from paceline.observe.event_types import RESERVED_NAMES
from paceline.world import World

Sums = dict[int, dict[str, tuple[float, float]]]  # by step and name: the sum of a value, and of its weights


class LoggedValue(NamedTuple):
    """A value that was logged in a batch."""

    step: int
    lane: int
    name: str
    samples: int
    step_samples: int
    value: Any  # a number, or a tensor on the device


class LoggedValues:
    """The values of this rank until the next log point."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: list[LoggedValue] = []
        self._sent: list[LoggedValue] = []
        self._on_host = torch.zeros(0)  # the tensors of the values that were sent, copied together

    def add(self, lane: Lane, values: Mapping[str, Any]) -> None:
        """Keep the values of a batch; no synchronisation."""
        place = lane.step, lane.lane
        self._pending += [
            LoggedValue(*place, name, lane.samples, lane.step_samples, each) for name, each in values.items()
        ]

    def send(self) -> None:
        """Start to copy the values so far to the host, without waiting."""
        self._sent, self._pending = self._sent + self._pending, []
        tensors = [each.value for each in self._sent if isinstance(each.value, torch.Tensor)]
        if not tensors:
            self._on_host = torch.zeros(0)
            return
        stacked = torch.stack([tensor.to(self._world.device).double().reshape(()) for tensor in tensors])
        is_on_gpu = stacked.device.type == "cuda"
        self._on_host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=is_on_gpu)
        self._on_host.copy_(stacked, non_blocking=True)

    def arrived(self) -> Sums:
        """The sums of the finite values of all lanes that were sent, once their copy is complete. All ranks.

        The mean of a step is the mean over the lanes that have logged the value. It has the weight of the whole step,
        so that a value that is logged once per update has the same mean on any number of ranks.
        """
        copied = iter(self._on_host.tolist())
        mine = [
            each._replace(value=next(copied) if isinstance(each.value, torch.Tensor) else float(each.value))
            for each in self._sent
        ]
        self._sent = []
        of_all = [each for of_rank in self._world.gather_objects(mine) for each in of_rank if math.isfinite(each.value)]
        lanes: dict[tuple[int, str], list[LoggedValue]] = {}
        for each in sorted(of_all, key=lambda each: (each.step, each.lane)):  # one order for any number of ranks
            lanes.setdefault((each.step, each.name), []).append(each)
        sums: Sums = {}
        for (step, name), values in lanes.items():
            if samples := sum(each.samples for each in values):
                mean = sum(each.value * each.samples for each in values) / samples
                sums.setdefault(step, {})[name] = mean * values[0].step_samples, values[0].step_samples
        return sums


def checked(name: str, value: Any) -> Any:
    """The value without its gradient, in memory that the user's code does not change.

    Raises a ConfigError if it cannot be logged as one number under this name.
    """
    if name in RESERVED_NAMES:
        raise ConfigError(f"run.log({name}=…) has a name that is reserved in events; choose another name")
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        detached = value.detach()
        return detached if value.grad_fn is not None else detached.clone()  # a weight or a running sum may change
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "size", 0) == 1):
        return float(value)
    shape = getattr(value, "shape", None)
    what = f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise ConfigError(f"run.log({name}=…) got {what}; log one number, such as its mean")
