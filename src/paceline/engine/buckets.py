"""Sums over ranks of the gradients of any parameters, while backward runs; used where the model is not inside DDP.

The gradients of all lanes of a step are summed by the same tree as in `reduce.py`. Where a lane has no gradient for a
parameter, −0.0 takes its place, which changes no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.reduce import Future, Gradients, LaneSum, Reduction, add_flag
from paceline.errors import ConfigError

ALIGNMENT_BYTES = 64  # at other addresses, kernels that sum may take another order


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

    def __post_init__(self) -> None:
        first = self.parameters[0]
        unit = max(ALIGNMENT_BYTES // first.element_size(), 1)
        sizes = [-(-parameter.numel() // unit) * unit for parameter in self.parameters]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.slots = [_slot(self.buffer, p, start) for p, start in zip(self.parameters, starts, strict=True)]
        self.is_used = self.buffer[sum(sizes) :]


class GradientSums:
    """The gradients of some parameters in one step: lane by lane over this rank, then in buckets over all ranks."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], lanes_per_rank: int, reduction: Reduction, bucket_bytes: float
    ) -> None:
        """All ranks, with the same parameters."""
        self.parameters, self.lanes_per_rank, self.reduction = list(parameters), lanes_per_rank, reduction
        self._lane_sum = LaneSum(lanes_per_rank)
        self._buckets = _buckets(self.parameters, bucket_bytes) if reduction.world.size > 1 else []
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._wait()  # for buckets of a step that was left
        self._lane_sum.restart()
        self._has_gradient = [False] * len(self.parameters)
        self._branches: list[Gradients] = []
        self._next = 0  # the first bucket that is not sent
        self._is_early = False

    def add(self, index: int) -> None:
        """Take the gradients of a lane that is not the last one out of the parameters."""
        taken = []
        for number, parameter in enumerate(self.parameters):
            self._has_gradient[number] |= parameter.grad is not None
            taken.append(parameter.grad if parameter.grad is not None else torch.full_like(parameter, -0.0))
            parameter.grad = None
        self._lane_sum.add(index, taken)

    # --- the last lane -----------------------------------------------------------------------------------------

    def expect(self, index: int, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        """Before the backward pass of the last lane: send each bucket as soon as its gradients are complete."""
        self._prepare(index, is_empty=is_empty, flag=flag)
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

    def finish(self, index: int, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        """After the backward pass of the last lane: leave the sums of all lanes in the parameters. All ranks."""
        if self._is_early:
            self.check_complete()
        else:
            self._wait()
            self._prepare(index, is_empty=is_empty, flag=flag)
        if not self._buckets:
            self._add_branches()
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

    def _prepare(self, index: int, *, is_empty: bool, flag: torch.Tensor | None) -> None:
        """Collect the sums of the other lanes; an empty lane adds nothing."""
        self._branches = self._lane_sum.remaining(self.lanes_per_rank if is_empty else index)
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
        for branch in self._branches:
            torch._foreach_add_(bucket.slots, [branch[number] for number in bucket.indices])
        bucket.is_used.fill_(1)
        for number, index in enumerate(bucket.indices):
            if not self._has_gradient[index]:
                bucket.is_used[number] = 0
        if self._flag is not None and present:  # once, to a gradient that exists: unused ones are dropped
            add_flag(self._flag, present[0][0])
            self._flag = None
        bucket.started = self.reduction.start(bucket.buffer)
        self._next += 1

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.started is not None:
                bucket.started.wait()
                bucket.started = None

    def _add_branches(self) -> None:
        """Add the other lanes to the last one, on a single rank."""
        for number, parameter in enumerate(self.parameters):
            if self._is_empty:
                parameter.grad = None
            self._has_gradient[number] |= parameter.grad is not None
            if parameter.grad is None and self._has_gradient[number]:
                parameter.grad = torch.full_like(parameter, -0.0)
        used = [number for number, has in enumerate(self._has_gradient) if has]
        gradients = [gradient for number in used if (gradient := self.parameters[number].grad) is not None]
        for branch in self._branches:
            torch._foreach_add_(gradients, [branch[number] for number in used])


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


def _slot(buffer: torch.Tensor, parameter: torch.Tensor, start: int) -> torch.Tensor:
    """A part of the buffer with the shape and strides of a parameter."""
    is_dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    part = buffer[start : start + parameter.numel()]
    return part.as_strided(parameter.shape, parameter.stride(), start) if is_dense else part.view(parameter.shape)
