"""Sums over ranks of the gradients of any parameters, while backward runs; used where the model is not inside DDP.

Where a lane has no gradient for a parameter, −0.0 takes its place, which changes no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.flat import slots_in, starts_of
from paceline.engine.integer_sum import Gradients
from paceline.engine.reduce import (
    ALIGNED_ELEMENTS,
    Future,
    LaneGradients,
    Reduction,
    add_flag,
    sum_on_one_rank,
)
from paceline.errors import ConfigError


@dataclass
class Bucket:
    """A part of the parameters, whose gradients are sent together."""

    parameters: list[torch.nn.Parameter]
    indices: list[int]  # of the parameters among all of them
    buffer: torch.Tensor = field(init=False)
    slots: Gradients = field(init=False)  # the part of the buffer for each gradient
    is_used: torch.Tensor = field(init=False)  # 1 for each parameter that has a gradient on any rank
    waiting: int = 0  # gradients that backward has not computed yet
    started: Future | None = None
    sent: list[Gradients] = field(default_factory=list)  # the finished lanes, which may be read until that is done

    def __post_init__(self) -> None:
        first, starts = self.parameters[0], starts_of(self.parameters, ALIGNED_ELEMENTS)
        self.buffer = torch.zeros(starts[-1] + len(self.parameters), dtype=first.dtype, device=first.device)
        self.slots = slots_in(self.buffer, self.parameters, starts)
        self.is_used = self.buffer[starts[-1] :]


class GradientSums:
    """The gradients of some parameters in one step: lane by lane over this rank, then in buckets over all ranks."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], reduction: Reduction) -> None:
        """All ranks, with the same parameters."""
        self.parameters, self.reduction = list(parameters), reduction
        self._finished = LaneGradients(keeps_each=reduction.uses_integers)
        self._buckets = _buckets(self.parameters, reduction.bucket_bytes) if reduction.world.size > 1 else []
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._wait()  # for buckets of a step that was left
        self._finished.restart()
        self._has_gradient = [False] * len(self.parameters)
        self._next = 0  # the first bucket that is not sent
        self._is_early = False

    def add(self) -> None:
        """Take the gradients of a lane that is not the last one out of the parameters."""
        taken = []
        for number, parameter in enumerate(self.parameters):
            self._has_gradient[number] |= parameter.grad is not None
            taken.append(parameter.grad if parameter.grad is not None else torch.full_like(parameter, -0.0))
            parameter.grad = None
        self._finished.add(taken)

    # --- the last lane -----------------------------------------------------------------------------------------

    def expect(self, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        """Before the backward pass of the last lane: send each bucket as soon as its gradients are complete."""
        self._prepare(is_empty=is_empty, flag=flag)
        self._is_early = True
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Called when backward has completed a gradient, between `expect` and `finish`. All ranks, in one order."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        bucket.waiting -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send_next()

    def cancel(self) -> None:
        """Send the gradients again in `finish`: another backward adds to them."""
        self._is_early = False

    def check_complete(self) -> None:
        """Raise if backward has added to a gradient after it was sent."""
        if any(bucket.waiting < 0 for bucket in self._buckets[: self._next]):
            raise ConfigError(
                "a parameter got its gradient in several parts in one backward pass, but not so in the first step; "
                "use torch.utils.checkpoint with use_reentrant=False"
            )

    def finish(self, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        """After the backward pass of the last lane: leave the sums of all lanes in the parameters. All ranks."""
        if self._is_early:
            self.check_complete()
        else:
            self._wait()
            self._prepare(is_empty=is_empty, flag=flag)
        if not self._buckets:
            self._sum_on_one_rank()
            return
        while self._next < len(self._buckets):
            self._send_next()
        self._wait()
        for bucket in self._buckets:
            # A parameter without a gradient on this rank may have one on another. Reading that waits for the device.
            is_whole = all(self._has_gradient[index] for index in bucket.indices)
            is_used = [True] * len(bucket.indices) if is_whole else bucket.is_used.gt(0).tolist()
            for parameter, slot, used in zip(bucket.parameters, bucket.slots, is_used, strict=True):
                parameter.grad = slot if used else None

    def _prepare(self, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        self._is_empty, self._flag, self._next, self._is_early = is_empty, flag, 0, False

    def _send_next(self) -> None:
        """Fill the next bucket and start to sum it over the ranks. All ranks."""
        bucket = self._buckets[self._next]
        gradients = [None if self._is_empty else parameter.grad for parameter in bucket.parameters]
        for number, gradient in zip(bucket.indices, gradients, strict=True):
            self._has_gradient[number] |= gradient is not None
        present = [(slot, each) for slot, each in zip(bucket.slots, gradients, strict=True) if each is not None]
        if present:
            torch._foreach_copy_([slot for slot, _ in present], [gradient for _, gradient in present])
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            if gradient is None:
                slot.fill_(-0.0)
        lanes = [[lane[number] for number in bucket.indices] for lane in self._finished.lanes]
        used = [place for place, number in enumerate(bucket.indices) if self._has_gradient[number]]
        if self._flag is not None and used and (present or lanes):  # once, to a gradient that exists
            add_flag(self._flag, [present[0][0]] if present else [lanes[0][used[0]]])
            self._flag = None
        # The marks of used parameters are summed like gradients: those of one lane.
        marks, nothing = torch.ones_like(bucket.is_used), torch.zeros_like(bucket.is_used)
        for place in {*range(len(bucket.indices))} - {*used}:
            marks[place] = 0
        bucket.is_used.copy_(nothing if lanes else marks)
        with_marks = [[*lane, nothing if index else marks] for index, lane in enumerate(lanes)]
        sums = [*bucket.slots, bucket.is_used]
        bucket.started = self.reduction.start(sums, with_marks, bucket.buffer, is_empty=self._is_empty)
        bucket.sent = with_marks  # another stream of the device reads them later
        self._next += 1

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.started is not None:
                bucket.started.wait()
                bucket.started, bucket.sent = None, []

    def _sum_on_one_rank(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if self._is_empty:
                parameter.grad = None
            self._has_gradient[number] |= parameter.grad is not None
            if parameter.grad is None and self._has_gradient[number]:
                parameter.grad = torch.full_like(parameter, -0.0)
        used = [number for number, has in enumerate(self._has_gradient) if has]
        lanes = [[lane[number] for number in used] for lane in self._finished.lanes]
        parameters = [self.parameters[number] for number in used]
        sum_on_one_rank(parameters, lanes, self.reduction, is_empty=self._is_empty)


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """The parameters in buckets of one dtype each, last parameters first: backward reaches them first."""
    found: list[list[int]] = []
    size = 0.0
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        is_other = bool(found) and parameters[found[-1][0]].dtype != parameter.dtype
        if not found or is_other or size + parameter.nbytes > bucket_bytes:
            found.append([])
            size = 0.0
        found[-1].append(index)
        size += parameter.nbytes
    return [Bucket([parameters[index] for index in indices], indices) for indices in found]
