"""Numbers that are not finite: all ranks skip the same step, and one warning says whose numbers they were.

A good step costs no message between ranks. A rank with a bad loss votes inside the sums of the gradients: NaN stays NaN
in any sum, so after the reduction every rank finds it there and decides the same by itself.

Where the optimizer can leave a step out by itself, the decision never leaves the device (`is_deferred`): the host
learns of a skipped step when it reads the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.data.lanes import Lane
from paceline.engine.buffers import Buffers, Copies
from paceline.engine.losses import number_on
from paceline.engine.precision import Scaler
from paceline.errors import NotFinite
from paceline.world import World

LISTED_SAMPLES, LISTED_LANES = 8, 4
WHAT_TO_DO = "look at these samples, lower the learning rate, or set clip_norm"

RideAgain = Callable[[Lane], list[torch.Tensor]]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Culprit(NamedTuple):
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
    """A step that the device has decided on: its lanes on this rank, and the (sum, count) of the loss of all lanes."""

    step: int
    lanes: Sequence[tuple[int, Any]]  # their numbers and indices
    totals: Sequence[Sequence[float]]
    is_skipped: bool


class Guard:
    """Decides after each reduction whether the step counts, and undoes one that does not."""

    def __init__(
        self,
        buffers: Buffers,
        settings: Settings,
        world: World,
        *,
        on_bad: Callable[[str], None],
        original: Callable[[Any], list[int]],
        is_deferred: bool = False,
    ) -> None:
        """`buffers` are put back after a bad step; `on_bad` takes the warning; `original` gives users' indices."""
        self.settings, self.world, self.on_bad, self.original = settings, world, on_bad, original
        self.scaler = Scaler() if settings.precision == "fp16" else None
        self.is_deferred = is_deferred
        self.vote = torch.tensor(-0.0, device=world.device)  # changes no bit of what it is added to, until it is NaN
        self.skipped_in_a_row = 0
        self._buffers, self._before = buffers, Copies()

    @property
    def scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def counters(self) -> dict[str, float]:
        """What the next steps depend on, as plain numbers."""
        scaler = {"scale": self.scaler.scale, "good_steps": self.scaler.good_steps} if self.scaler is not None else {}
        return {"skipped_in_a_row": self.skipped_in_a_row, **scaler}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Go on from what `counters` gave; what is not among them stays as it is."""
        self.skipped_in_a_row = int(counters.get("skipped_in_a_row", self.skipped_in_a_row))
        if self.scaler is not None:
            self.scaler.scale = float(counters.get("scale", self.scaler.scale))
            self.scaler.good_steps = int(counters.get("good_steps", self.scaler.good_steps))

    def begin(self) -> None:
        """Before a step: no objections yet, and a copy of the buffers, which a forward pass may spoil."""
        if self.world.size > 1:  # a single rank's losses speak for themselves
            self.vote.fill_(-0.0)
        self._before.take(self._buffers.live())

    def see(self, loss: torch.Tensor) -> None:
        """Take in the loss of a lane, before its backward; no synchronisation."""
        self.vote.sub_(loss.detach().abs(), alpha=0.0)  # −0.0 − 0 × loss: −0.0 again, or NaN

    def allows(self, sums: Iterable[torch.Tensor]) -> bool:
        """Whether the sums of the step are finite, the same on all ranks; fp16's are divided by their scale, too."""
        if not are_finite(sums, 1 / self.scale):
            return False
        self.skipped_in_a_row = 0
        if self.scaler is not None:
            self.scaler.grow()
        return True

    def skip(self, step: int, lanes: Sequence[Lane], totals: torch.Tensor, ride_again: RideAgain) -> None:
        """Undo a step that does not count, and tell; raises NotFinite where the run must not go on. All ranks."""
        self._restore()
        self.skipped_in_a_row += 1
        culprits = self._with_bad_loss(lanes, totals)
        is_overflow = self.scaler is not None and not culprits  # the scale was too large: fp16's daily life
        if self.scaler is not None and is_overflow:
            self.scaler.shrink()
        elif not culprits:
            culprits = self._with_bad_gradients(lanes, ride_again)
        if is_overflow:
            last = f"the loss scale fell to {self.scale:g}; use precision: bf16"
        else:
            who = _listed(culprits) or "no lane by itself, only the sum of their gradients"
            self._tell(step, who)
            last = f"{who}; {WHAT_TO_DO}"
        self._check_limit(step, last)

    @torch.no_grad()
    def undo_if(self, is_bad: torch.Tensor) -> None:
        """Give the buffers back what they held before the step if it is bad; decided on the device."""
        buffers = self._buffers.live()
        if self._before.reshaped(buffers) and is_bad.item():  # only the host can give a tensor another shape
            self._restore()
            return
        by_size: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for buffer, kept in (map(_words, pair) for pair in self._before.alike(buffers)):
            live, before = by_size.setdefault(buffer.element_size(), ([], []))
            live.append(buffer)
            before.append(kept)
        # As whole numbers, because 0 × NaN is NaN; one kernel for many buffers.
        for size, (live, before) in by_size.items():
            differences = torch._foreach_sub(before, live)
            torch._foreach_mul_(differences, is_bad.to(WORDS[size]))
            torch._foreach_add_(live, differences)

    def review(self, steps: Iterable[FinishedStep]) -> None:
        """Count and tell the steps that the device has skipped, in their order; raises NotFinite as `skip` does.

        All ranks, with the same steps.
        """
        for past in steps:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if past.is_skipped else 0
            if past.is_skipped:
                who = _listed(self._at_fault(past)) or "their losses are finite, their gradients are not"
                self.on_bad(f"step {past.step + 1} is skipped, it is not finite: {who}")
                self._check_limit(past.step, f"{who}; {WHAT_TO_DO}")

    def _at_fault(self, past: FinishedStep) -> list[Culprit]:
        """The lanes of all ranks whose loss is not finite. All ranks."""
        losses = {
            lane: f"loss {total / count if count else math.nan}"
            for lane, (total, count) in enumerate(past.totals)
            if not math.isfinite(total) or not math.isfinite(count)
        }
        mine = [(lane, indices) for lane, indices in past.lanes if lane in losses]
        found = [Culprit(self.world.rank, lane, losses[lane], self.original(indices)) for lane, indices in mine]
        return [culprit for of_rank in self.world.gather_objects(found) for culprit in of_rank]

    def _check_limit(self, step: int, last: str) -> None:
        limit = self.settings.nan_limit
        if self.skipped_in_a_row >= limit:
            raise NotFinite(f"nan_limit={limit} steps in a row were not finite, the last was step {step + 1}: {last}")

    def _tell(self, step: int, who: str) -> None:
        if self.settings.nan == "stop":
            raise NotFinite(
                f"nan=stop and step {step + 1} is not finite: {who}; "
                "look at these samples, or set nan: skip to train on without such steps"
            )
        if self.settings.nan == "skip":
            self.on_bad(f"step {step + 1} is skipped, it is not finite: {who}")

    def _restore(self) -> None:
        self._before.put_back(self._buffers.live())

    def _with_bad_loss(self, lanes: Sequence[Lane], totals: torch.Tensor) -> list[Culprit]:
        """The lanes of all ranks whose loss is not finite. All ranks."""
        is_finite, means = totals.isfinite().all(dim=1).tolist(), (totals[:, 0] / totals[:, 1]).tolist()
        places = {lane.lane % len(totals): lane for lane in lanes}
        return self._gathered((lane, f"loss {means[at]}") for at, lane in places.items() if not is_finite[at])

    def _with_bad_gradients(self, lanes: Sequence[Lane], ride_again: RideAgain) -> list[Culprit]:
        """Their losses are finite; only riding every lane by itself can tell whose gradients are not. All ranks."""
        # Empty lanes are ridden too: layers that talk to other ranks need all of them.
        bad = [lane for lane in lanes if not are_finite(ride_again(lane)) and lane.samples]
        self._restore()
        return self._gathered((lane, "gradients") for lane in bad)

    def _gathered(self, mine: Iterable[tuple[Lane, str]]) -> list[Culprit]:
        """What each rank found, in the order of the lanes. All ranks."""
        found = [Culprit(self.world.rank, lane.lane, what, self.original(lane.indices)) for lane, what in mine]
        return [culprit for of_rank in self.world.gather_objects(found) for culprit in of_rank]


def are_finite(sums: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
    """Whether all numbers are finite; they are multiplied by `factor` in the same pass."""
    numbers = list(sums)
    # A sum is quicker than a look at each number. If it is finite they all are; if it is not, it may have overflowed.
    is_plain = factor == 1 and all(number.device.type == "cpu" and not number.is_sparse for number in numbers)
    if is_plain and all(math.isfinite(abs(number.sum().item())) for number in numbers):
        return True
    return not found_bad(numbers, factor).item()  # waits for the device


def found_bad(sums: Iterable[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """1.0 if a number is not finite, else 0.0, on the device; they are multiplied by `factor`."""
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
    """The same memory as whole numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(WORDS[real.element_size()])


def _listed(culprits: Sequence[Culprit]) -> str:
    more = len(culprits) - LISTED_LANES
    return "; ".join(map(str, culprits[:LISTED_LANES])) + f"; and {more} more lanes" * (more > 0)
