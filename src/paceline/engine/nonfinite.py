"""Steps with numbers that are not finite: all ranks skip the same step, and one warning names lanes and samples.

A good step costs no extra message between ranks. A rank with a bad loss adds NaN to one of its gradients (`nan_flag`).
NaN stays NaN in any sum, so after the reduction every rank finds it and takes the same decision. With a sharded
optimizer only the gradient's owner finds it, and `Sharding.largest` has it known to all ranks.

Where the optimizer can skip a step on the device, the decision stays there (`is_deferred`): the host reads it later,
together with the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.data.lanes import Lane, RankLanes
from paceline.engine.digest import INTEGER_TYPES
from paceline.engine.forward_state import ForwardState, Snapshot
from paceline.engine.losses import number_on
from paceline.errors import NotFinite
from paceline.world import World

LISTED_SAMPLES, LISTED_LANES = 8, 4
FINITE_LOSSES = "their losses are finite, their gradients are not"
ADVICE = "look at these samples, lower the learning rate, or set clip_norm"

GROW_AFTER = 2000  # good steps in a row, after which the loss scale is doubled

Rerun = Callable[[Lane], list[torch.Tensor]]  # runs one lane again and returns its gradients


@dataclass
class LossScale:
    """The factor of the loss that keeps small gradients from vanishing in fp16.

    It is always a power of two: multiplying and dividing by it rounds nothing.
    """

    scale: float = 2.0**16
    good_steps: int = 0  # since the scale last changed

    def grow(self) -> None:
        """Count a good step, and double the scale after GROW_AFTER of them."""
        self.good_steps += 1
        if self.good_steps == GROW_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0

    def shrink(self) -> None:
        """Halve the scale, after a step whose gradients were too large for fp16."""
        self.scale, self.good_steps = self.scale / 2, 0


class BadLane(NamedTuple):
    """A lane whose loss or gradients are not finite."""

    rank: int
    lane: int
    what: str
    samples: list[int]

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.samples[:LISTED_SAMPLES]))
        more = len(self.samples) - LISTED_SAMPLES
        return f"rank {self.rank}, lane {self.lane}: {self.what}, samples {listed}{f' and {more} more' * (more > 0)}"


class FinishedStep(NamedTuple):
    """A step whose update the device has applied or skipped."""

    step: int
    lanes: Sequence[tuple[int, Any]]  # the lanes of this rank, each with the indices of its samples
    totals: Sequence[Sequence[float]]  # the sum and the count of the loss, for each lane of all ranks
    is_skipped: bool


class Guard:
    """Decides after each reduction whether the step is finite, and undoes a step that is not."""

    def __init__(
        self,
        buffers: ForwardState,
        settings: Settings,
        world: World,
        *,
        on_bad: Callable[[str], None],
        original: Callable[[Any], list[int]],
        is_deferred: bool = False,
    ) -> None:
        """`buffers` are restored after a bad step.

        `on_bad` is called with the warning; `original` translates indices into those of the user's data set.
        """
        self.settings, self.world, self.on_bad, self.original = settings, world, on_bad, original
        self._rank_lanes = RankLanes(settings.lanes, world.size, world.rank)
        self.scaler = LossScale() if settings.precision == "fp16" else None
        self.is_deferred = is_deferred
        self.is_fatal = False  # whether the optimizer has applied a bad step, because it cannot skip one on the device
        # −0.0 changes no bit of the number to which it is added. It becomes NaN when a loss is not finite.
        self.nan_flag = torch.tensor(-0.0, device=world.device)
        self.skipped_in_a_row = 0
        self._buffers, self.before = buffers, Snapshot()  # of the step's start

    @property
    def scale(self) -> float:
        """The factor of losses before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def counters(self) -> dict[str, float]:
        """The numbers on which the next steps depend, for a checkpoint."""
        scaler = {"scale": self.scaler.scale, "good_steps": self.scaler.good_steps} if self.scaler is not None else {}
        return {"skipped_in_a_row": self.skipped_in_a_row, **scaler}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Set the numbers that `counters` returned; missing ones are not changed."""
        self.skipped_in_a_row = int(counters.get("skipped_in_a_row", self.skipped_in_a_row))
        if self.scaler is not None:
            self.scaler.scale = float(counters.get("scale", self.scaler.scale))
            self.scaler.good_steps = int(counters.get("good_steps", self.scaler.good_steps))

    def begin(self) -> None:
        """Before a step: reset the flag and copy the buffers, which a bad forward pass may spoil."""
        if self.world.size > 1:  # a single rank checks its losses themselves
            self.nan_flag.fill_(-0.0)
        self.before.take(self._buffers.tensors())

    def check_loss(self, loss: torch.Tensor) -> None:
        """Set the flag to NaN if the loss of a lane is not finite; no synchronisation."""
        self.nan_flag.sub_(loss.detach().abs(), alpha=0.0)  # −0.0 − 0 × loss: −0.0 again, or NaN

    def defer(self, *, can_skip: bool) -> None:
        """Leave the check of the numbers to the device; `can_skip`: whether the optimizer skips a bad step there."""
        self.is_deferred, self.is_fatal = True, self.is_fatal or not can_skip

    def allows(self, sums: Iterable[torch.Tensor]) -> bool:
        """Whether the sums of the step are finite, the same on all ranks; in fp16, divide them by the scale."""
        return are_finite(sums, 1 / self.scale)

    def count_good(self) -> None:
        """Count a step whose sums were all finite."""
        self.skipped_in_a_row = 0
        if self.scaler is not None:
            self.scaler.grow()

    def skip(self, step: int, lanes: Sequence[Lane], totals: torch.Tensor, rerun: Rerun | None) -> None:
        """Undo a step that is not finite, and warn; raises NotFinite where the run must stop. All ranks.

        Without `rerun`, lanes whose gradients alone are not finite are not searched for.
        """
        self._restore()
        self.skipped_in_a_row += 1
        bad = self._with_bad_loss(lanes, totals)
        is_overflow = self.scaler is not None and not bad  # the scale was too large, which is normal in fp16
        if self.scaler is not None and is_overflow:
            self.scaler.shrink()
        elif not bad and rerun is not None:
            bad = self._with_bad_gradients(lanes, rerun)
        if is_overflow:
            last = f"the loss scale fell to {self.scale:g}; use precision: bf16"
        else:
            found = "no lane by itself, only the sum of their gradients" if rerun is not None else FINITE_LOSSES
            where = _list_lanes(bad) or found
            self._warn_or_stop(step, where)
            last = f"{where}; {ADVICE}"
        self._check_limit(step, last)

    @torch.no_grad()
    def undo_if(self, is_bad: torch.Tensor) -> None:
        """Restore the buffers from before the step if `is_bad` is 1; decided on the device."""
        buffers = self._buffers.tensors()
        if self.before.reshaped(buffers) and is_bad.item():  # only the host can give a tensor another shape
            self._restore()
            return
        by_size: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for buffer, kept in (map(_words, pair) for pair in self.before.same_shape(buffers)):
            current, before = by_size.setdefault(buffer.element_size(), ([], []))
            current.append(buffer)
            before.append(kept)
        # As integers, because 0 × NaN is NaN; one kernel for many buffers.
        for size, (current, before) in by_size.items():
            differences = torch._foreach_sub(before, current)
            torch._foreach_mul_(differences, is_bad.to(INTEGER_TYPES[size]))
            torch._foreach_add_(current, differences)

    def review(self, steps: Iterable[FinishedStep]) -> None:
        """Count the steps that the device has skipped, and warn of each; raises NotFinite as `skip` does.

        All ranks, with the same steps.
        """
        for finished in steps:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if finished.is_skipped else 0
            if finished.is_skipped:
                where = _list_lanes(self._bad_lanes_of(finished)) or FINITE_LOSSES
                if self.is_fatal:
                    raise NotFinite(
                        f"step {finished.step + 1} is not finite: {where}; the optimizer cannot skip it on the GPU; "
                        f"create it with fused=True, or {ADVICE}"
                    )
                self.on_bad(f"step {finished.step + 1} is skipped, it is not finite: {where}")
                self._check_limit(finished.step, f"{where}; {ADVICE}")

    def _bad_lanes_of(self, finished: FinishedStep) -> list[BadLane]:
        """The lanes of all ranks whose loss is not finite. All ranks."""
        losses = {
            lane: f"loss {total / count if count else math.nan}"
            for lane, (total, count) in enumerate(finished.totals)
            if not math.isfinite(total) or not math.isfinite(count)
        }
        return self._gathered((lane, losses[lane], indices) for lane, indices in finished.lanes if lane in losses)

    def _check_limit(self, step: int, last: str) -> None:
        limit = self.settings.nan_limit
        if self.skipped_in_a_row >= limit:
            raise NotFinite(f"nan_limit={limit} steps in a row were not finite, the last was step {step + 1}: {last}")

    def _warn_or_stop(self, step: int, where: str) -> None:
        if self.settings.nan == "stop":
            raise NotFinite(
                f"nan=stop and step {step + 1} is not finite: {where}; "
                "look at these samples, or set nan: skip to leave such steps out"
            )
        if self.settings.nan == "skip":
            self.on_bad(f"step {step + 1} is skipped, it is not finite: {where}")

    def _restore(self) -> None:
        self.before.restore(self._buffers.tensors())

    def _with_bad_loss(self, lanes: Sequence[Lane], totals: torch.Tensor) -> list[BadLane]:
        """The lanes of all ranks whose loss is not finite. All ranks."""
        is_finite, means = totals.isfinite().all(dim=1).tolist(), (totals[:, 0] / totals[:, 1]).tolist()
        by_index = {self._rank_lanes.place_of(lane.lane): lane for lane in lanes}
        bad = [(index, lane) for index, lane in by_index.items() if not is_finite[index]]
        return self._gathered((lane.lane, f"loss {means[index]}", lane.indices) for index, lane in bad)

    def _with_bad_gradients(self, lanes: Sequence[Lane], rerun: Rerun) -> list[BadLane]:
        """The lanes of all ranks whose gradients are not finite, found by running each lane alone. All ranks."""
        # Empty lanes run too: layers that communicate between ranks need all of them.
        bad = [lane for lane in lanes if not are_finite(rerun(lane)) and lane.samples]
        self._restore()
        return self._gathered((lane.lane, "gradients", lane.indices) for lane in bad)

    def _gathered(self, mine: Iterable[tuple[int, str, Any]]) -> list[BadLane]:
        """The bad lanes of all ranks, in the order of the lanes; `mine` has number, problem and indices. All ranks."""
        found = [BadLane(self.world.rank, lane, what, self.original(indices)) for lane, what, indices in mine]
        return [lane for of_rank in self.world.gather_objects(found) for lane in of_rank]


def are_finite(sums: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
    """Whether all numbers are finite; they are multiplied by `factor` in the same pass."""
    numbers = list(sums)
    # A sum is quicker than a test of each number. If it is finite they all are; if it is not, it may have overflowed.
    is_plain = factor == 1 and all(number.device.type == "cpu" and not number.is_sparse for number in numbers)
    if is_plain and all(math.isfinite(abs(number.sum().item())) for number in numbers):
        return True
    return not nonfinite_flag(numbers, factor).item()  # waits for the device


def nonfinite_flag(sums: Iterable[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """1.0 if any number is not finite, else 0.0, on the device; the numbers are multiplied by `factor`."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in sums:
        values = gradient._values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        by_dtype.setdefault(values.dtype, []).append(values)
    if not by_dtype:
        return torch.zeros(())
    device = next(iter(by_dtype.values()))[0].device
    is_bad, multiplier = torch.zeros((), device=device), number_on(factor, device)
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, is_bad, multiplier)
    return is_bad


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(INTEGER_TYPES[real.element_size()])


def _list_lanes(bad: Sequence[BadLane]) -> str:
    more = len(bad) - LISTED_LANES
    return "; ".join(map(str, bad[:LISTED_LANES])) + f"; and {more} more lanes" * (more > 0)
