"""One phase of a step: an objective over all lanes, its sums over lanes and ranks, their check, and one update.

A step without phases has one, named "". The phases of a step run one after the other, each with its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.config.phases import Every
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane
from paceline.data.seeding import seed_generators
from paceline.engine.clipping import clip_by_norm
from paceline.engine.clock import OPTIMIZER, PhaseClock
from paceline.engine.gradients import Backward
from paceline.engine.losses import number_on
from paceline.engine.nonfinite import Guard, nonfinite_flag
from paceline.engine.objective import LOSS, Objective
from paceline.engine.optimizers import can_skip
from paceline.engine.replica import PlainModel, Replica
from paceline.engine.sharding import Sharding
from paceline.world import World

NO_NORM = -1.0  # stands for the norm of gradients where it was not computed
Number = torch.Tensor | float


class PhaseResult(NamedTuple):
    """The numbers of one phase of a step."""

    losses: list[torch.Tensor]  # the sum and the count of each lane
    values: list[torch.Tensor]  # the same of each further value
    grad_norm: Number
    is_bad: torch.Tensor | None  # 1 if the device has skipped the update
    is_updated: bool  # False if the host has skipped the update


class Phase:
    """The forward and backward passes of a phase, and the update of the parameters of its optimizer."""

    def __init__(
        self,
        name: str,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        replica: Replica | PlainModel,
        settings: Settings,
        feed: Feed,
        *,
        sharding: Sharding | None,
        world: World,
        clock: PhaseClock,
        warn: Callable[[str], None],
        through_ddp: bool,
    ) -> None:
        """All ranks."""
        self.name, self.optimizer, self.settings, self.world, self.clock = name, optimizer, settings, world, clock
        self.every = objective.function if isinstance(objective.function, Every) else None
        self.sharding, self.warn = sharding, warn
        self.frozen: list[torch.nn.Parameter] = []  # the update leaves them unchanged
        self.guard = self._make_guard(replica, feed)
        groups = optimizer.param_groups if name else ()  # without phases, all parameters have gradients
        self.backward = Backward(
            replica, settings, feed, self.guard, world=world, clock=clock, through_ddp=through_ddp, objective=objective,
            optimized={parameter for group in groups for parameter in group["params"]} if name else None,
            sharding=sharding,
        )  # fmt: skip

    def _make_guard(self, replica: Replica | PlainModel, feed: Feed) -> Guard | None:
        """The check for numbers that are not finite, unless it is off and not needed for fp16."""
        settings = self.settings
        if settings.nan == "off" and settings.precision != "fp16":
            return None
        can_defer = settings.nan == "skip" and settings.precision != "fp16" and not self.name
        return Guard(
            replica.forward_state,
            settings,
            self.world,
            on_bad=self._warn_of_bad,
            original=feed.original_indices,
            is_deferred=can_defer and can_skip(self.optimizer, self.sharding.elsewhere if self.sharding else ()),
        )

    def _warn_of_bad(self, text: str) -> None:
        self.warn(f"phase {self.name}: {text}" if self.name else text)

    @property
    def value_names(self) -> list[str]:
        """The names of the further values, as logged: those of phases have the phase in front, and include the loss."""
        names = self.backward.values.names or ()
        return [f"{self.name}_{name}" for name in (LOSS, *names)] if self.name else list(names)

    def is_due(self, step: int) -> bool:
        """Whether the phase runs at a step."""
        return self.every is None or self.every.is_due(step)

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Prepare for the lanes of a step."""
        self.backward.begin(lanes)

    def run_lane(self, lane: Lane, inputs: LaneInputs, *, is_first: bool) -> None:
        """Run forward and backward of the next lane. All ranks."""
        if self.name:
            self._seed(lane)
        if self.guard is not None and is_first:
            self.guard.begin()
        self.backward.run_lane(lane, inputs)

    def _seed(self, lane: Lane) -> None:
        """Key the generators of a lane, so that phases draw other numbers."""
        own = (self.name,) if self.name else ()
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane, *own)

    def update(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> PhaseResult:
        """Complete the sums, check them and update the weights. All ranks."""
        losses, values = self.backward.finish(), self.backward.values.finish()
        self.clock.enter(OPTIMIZER)
        is_bad: torch.Tensor | None = None
        # Before clipping, whose norm would spread one NaN over all gradients.
        if self.guard is not None and self.guard.is_deferred:
            is_bad = self._anywhere(nonfinite_flag(self.backward.sums()))
        elif self.guard is not None and not self._is_finite(self.guard):
            self._skip(self.guard, lanes, inputs, torch.stack(tuple(losses)))
            zero = number_on(0, self.world.device)
            return PhaseResult([zero] * len(losses), [zero] * len(values), NO_NORM, None, is_updated=False)
        elif self.guard is not None:
            self.guard.count_good()
        used = self._without_frozen()
        norm: Number = NO_NORM  # without clipping it would cost a pass over the gradients
        if self.settings.clip_norm is not None:
            norm = clip_by_norm(used, self.settings.clip_norm, self.sharding)
        if is_bad is not None:
            self.optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        (self.sharding or self.optimizer).step()
        if self.guard is not None and is_bad is not None:
            self.guard.undo_if(is_bad)
        return PhaseResult(losses, values, norm, is_bad, is_updated=True)

    def _is_finite(self, guard: Guard) -> bool:
        """Whether the sums are finite on all ranks. All ranks."""
        is_finite = guard.allows(self.backward.sums())
        return is_finite if self.sharding is None else not self._anywhere(torch.tensor(float(not is_finite))).item()

    def _anywhere(self, is_bad: torch.Tensor) -> torch.Tensor:
        """1 if it is 1 on any rank, whose gradients are others with a sharded optimizer. All ranks."""
        return is_bad if self.sharding is None else self.sharding.largest(is_bad)

    def _without_frozen(self) -> list[torch.nn.Parameter]:
        """The parameters that are updated; the gradients of the others are removed."""
        for parameter in self.frozen:
            parameter.grad = None
        frozen = set(self.frozen)
        return [parameter for parameter in self.backward.used if parameter not in frozen]

    def _skip(self, guard: Guard, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], losses: torch.Tensor) -> None:
        """Undo the phase and find the lanes whose numbers are not finite. All ranks."""
        inputs_of = {lane.lane: of_lane for lane, of_lane in zip(lanes, inputs, strict=True)}

        def rerun(lane: Lane) -> list[torch.Tensor]:
            self._seed(lane)
            return self.backward.lane_gradients(lane, inputs_of[lane.lane])

        guard.skip(lanes[0].step, lanes, losses.view(-1, 2), rerun)

    def counters(self) -> dict[str, Any]:
        """The numbers on which the next steps depend, for a checkpoint."""
        return {**self.guard.counters()} if self.guard is not None else {}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the numbers that `counters` returned."""
        if self.guard is not None:
            self.guard.set_counters(counters)
