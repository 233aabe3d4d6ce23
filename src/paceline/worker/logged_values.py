"""What the user's own loop logs in its batches: kept on the device, then averaged over the lanes of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch

from paceline.errors import ConfigError
from paceline.observe.event_types import RESERVED_NAMES
from paceline.world import World

Sums = dict[int, dict[str, tuple[float, float]]]  # by step and name: the sum of a value, and of its weights


class LoggedValue(NamedTuple):
    """A value that was logged in a batch."""

    step: int
    lane: int
    name: str
    weight: int
    value: Any  # a number, or a tensor on the device


class LoggedValues:
    """The values of this rank until the next log point."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: list[LoggedValue] = []
        self._sent: list[LoggedValue] = []
        self._on_host = torch.zeros(0)  # the tensors of what was sent, copied together

    def add(self, step: int, lane: int, weight: int, values: Mapping[str, Any]) -> None:
        """Keep the values of a batch; no synchronisation."""
        self._pending += [LoggedValue(step, lane, name, weight, checked(name, each)) for name, each in values.items()]

    def send(self) -> None:
        """Begin to copy the values so far to the host, without waiting."""
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
        """The sums of the finite values of all lanes that were sent, once their copy is complete. All ranks."""
        copied = iter(self._on_host.tolist())
        mine = [
            each._replace(value=next(copied) if isinstance(each.value, torch.Tensor) else float(each.value))
            for each in self._sent
        ]
        self._sent = []
        sums: Sums = {}
        of_all = [each for of_rank in self._world.gather_objects(mine) for each in of_rank if math.isfinite(each.value)]
        for each in sorted(of_all, key=lambda each: (each.step, each.lane)):  # one order at any number of ranks
            of_step = sums.setdefault(each.step, {})
            total, weight = of_step.get(each.name, (0.0, 0.0))
            of_step[each.name] = total + each.value * each.weight, weight + each.weight
        return sums


def checked(name: str, value: Any) -> Any:
    """The value without its gradient; raises a ConfigError if it cannot be logged as one number under this name."""
    if name in RESERVED_NAMES:
        raise ConfigError(f"run.log({name}=…) has a name that is reserved in events; choose another name")
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "size", 0) == 1):
        return float(value)
    shape = getattr(value, "shape", None)
    what = f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise ConfigError(f"run.log({name}=…) got {what}; log one number, such as its mean")
