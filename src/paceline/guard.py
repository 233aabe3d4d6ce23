"""Numbers that are not finite: all ranks skip the same step, and one warning says whose numbers they were.

A good step costs no message between ranks. A rank with a bad loss votes inside the sums of the gradients: NaN stays NaN
in any sum, so after the reduction every rank finds it there and decides the same by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.config import Config
from paceline.data.loader import Lane
from paceline.errors import NotFinite
from paceline.precision import Scaler
from paceline.world import World

LISTED_SAMPLES, LISTED_LANES = 8, 4

RideAgain = Callable[[Lane], list[torch.Tensor]]


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


class Guard:
    """Decides after each reduction whether the step counts, and undoes one that does not."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        world: World,
        *,
        on_bad: Callable[[str], None],
        original: Callable[[Sequence[int]], list[int]],
    ) -> None:
        """`on_bad` takes the warning; `original` gives the indices that users know for those of a lane."""
        self.model, self.config, self.world, self.on_bad, self.original = model, config, world, on_bad, original
        self.scaler = Scaler() if config.precision == "fp16" else None
        self.vote = torch.tensor(-0.0, device=world.device)  # changes no bit of what it is added to, until it is NaN
        self.skipped_in_a_row = 0
        self._kept: list[torch.Tensor] = []

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

    @torch.no_grad()
    def begin(self) -> None:
        """Before a step: no objections yet, and a copy of the buffers, which a forward pass may spoil."""
        self.vote.fill_(-0.0)
        buffers = list(self.model.buffers())
        if [buffer.shape for buffer in buffers] != [kept.shape for kept in self._kept]:
            self._kept = [buffer.clone() for buffer in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    def see(self, loss: torch.Tensor) -> None:
        """Take in the loss of a lane, before its backward; no synchronisation."""
        self.vote.masked_fill_(~loss.detach().isfinite().all(), math.nan)

    def allows(self, gradients: list[torch.Tensor]) -> bool:
        """Whether the sums of the step are finite, the same on all ranks; fp16's are divided by their scale, too."""
        if not are_finite(gradients, 1 / self.scale):
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
            self._tell(step, _listed(culprits))
            last = f"{_listed(culprits)}; look at these samples, lower the learning rate, or set clip_norm"
        limit = self.config.nan_limit
        if self.skipped_in_a_row >= limit:
            raise NotFinite(f"nan_limit={limit} steps in a row were not finite, the last was step {step + 1}: {last}")

    def _tell(self, step: int, who: str) -> None:
        if self.config.nan == "stop":
            raise NotFinite(
                f"nan=stop and step {step + 1} is not finite: {who}; "
                "look at these samples, or set nan: skip to train on without such steps"
            )
        if self.config.nan == "skip":
            self.on_bad(f"step {step + 1} is skipped, it is not finite: {who}")

    @torch.no_grad()
    def _restore(self) -> None:
        # A forward pass may also have put another tensor, of another shape, in a buffer's place.
        for buffer, kept in zip(self.model.buffers(), self._kept, strict=False):
            buffer.resize_(kept.shape).copy_(kept)

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


def are_finite(gradients: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
    """Whether all gradients are finite; they are multiplied by `factor` in the same pass."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        by_dtype.setdefault(values.dtype, []).append(values)
    if not by_dtype:
        return True
    device = next(iter(by_dtype.values()))[0].device
    is_bad, multiplier = torch.zeros(1, device=device), torch.full((), factor, device=device)
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, is_bad, multiplier)
    return not is_bad.item()  # waits for the device: on a GPU the one such wait of a step


def _listed(culprits: Sequence[Culprit]) -> str:
    if not culprits:
        return "no lane by itself, only the sum of their gradients"
    more = len(culprits) - LISTED_LANES
    return "; ".join(map(str, culprits[:LISTED_LANES])) + f"; and {more} more lanes" * (more > 0)
