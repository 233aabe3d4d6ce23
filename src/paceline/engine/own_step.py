"""A step of the user's own loop: `run.backward` and `run.step` over the lanes of a step, with one sum at any ranks.

The user's code runs forward passes between the calls of this class; `worker/own_loop.py` calls `begin`, `enter`,
`leave` and `end` around the batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_not
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.lanes import Lane, RankLanes, StepInputs
from paceline.data.seeding import seed_generators
from paceline.engine.buckets import GradientSums
from paceline.engine.clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, REDUCTION, PhaseClock
from paceline.engine.ema import Ema
from paceline.engine.forward_state import EvaluationBuffers, LaneBuffers, LateBuffers
from paceline.engine.gradient_hooks import GradientHooks
from paceline.engine.losses import mean_of, number_on, sum_and_count
from paceline.engine.nonfinite import Guard, nonfinite_flag
from paceline.engine.optimizers import can_skip
from paceline.engine.phase import NO_NORM, Number
from paceline.engine.reduce import reduction_of
from paceline.engine.replica import BareReplica
from paceline.engine.step import StepResult
from paceline.engine.step_calls import StepCalls
from paceline.errors import ConfigError
from paceline.world import World


class OwnStep:
    """The present step of the user's own loop."""

    def __init__(
        self, replica: BareReplica, settings: Settings, guard: Guard | None, clock: PhaseClock, world: World
    ) -> None:
        """All ranks."""
        self.replica, self.settings, self.guard, self.clock, self.world = replica, settings, guard, clock, world
        self.rank_lanes = RankLanes(settings.lanes, world.size, world.rank)
        self.reduction = reduction_of(world, settings, exact=settings.exact, clock=clock)
        self.ema = Ema(replica.module, settings.ema) if settings.ema is not None else None
        self._is_first = True  # whether no update was completed, so that frozen parameters count as buffers
        self.lr = 0.0  # of the first group of the optimizer that has stepped last
        self.lane: Lane | None = None  # of the batch that the user's code has
        self._buffers = LaneBuffers(replica.forward_state, guard.before if guard is not None else None)
        self._late: LateBuffers | None = None  # in the first batches
        self.evaluation = EvaluationBuffers(replica.forward_state, self._buffers)
        self._sums: dict[torch.optim.Optimizer, GradientSums] = {}
        self._early: GradientSums | None = None  # sends gradients during backward, if the loop has the form for it
        self._lanes: Sequence[Lane] = ()
        self.hooks = GradientHooks(reduction_of(world, settings, exact=False))
        self.hooks.watch(replica.module.parameters())
        self._modules = [replica.module]
        self.calls = StepCalls(settings.lanes, world.size, self.hooks)

    # --- around the batches ------------------------------------------------------------------------------------

    def begin(self, inputs: StepInputs) -> None:
        """Prepare for the lanes of a step."""
        self.evaluation.end()  # if the user's code has left it early
        self._lanes = inputs.lanes
        self._totals: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * self.rank_lanes.most
        self._norm: Number = NO_NORM
        self._is_bad: torch.Tensor | None = None
        self._is_updated = self._is_skipped = False
        self.calls.begin()
        for sums in self._sums.values():
            sums.restart()
        if self._is_first:  # whether forward passes move frozen parameters is known after the update
            self.replica.forward_state.add_moving(self.replica.forward_state.frozen())
        if self.guard is not None:
            self.guard.begin()
        keeps_first = self._lanes[0].samples > 0 and self._place(self._lanes[0]) == 0
        self._buffers.begin(len(self._lanes), keeps_first=keeps_first)

    def enter(self, lane: Lane) -> None:
        """Before the user's code gets the batch of a lane: its buffers and generators."""
        self._buffers.enter()
        if self._late is None and self.settings.lanes > 1:
            self._late = LateBuffers(self.replica.forward_state)
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        self.lane = lane
        self.calls.enter()
        self.clock.enter(FORWARD)

    def leave(self) -> None:
        """After the user's code has processed the batch of a lane."""
        if self._late is not None and not self._late.is_done and self.lane is not None and self.lane.samples:
            problem = self._late.check()
            if problem is not None:
                raise ConfigError(problem)
        self.lane = None
        self._buffers.leave()

    def check_lane(self) -> None:
        """Refuse a batch whose calls do not fit those of the other batches of the step."""
        self.calls.check_lane(is_first=self.lane is self._lanes[0])

    def abandon(self) -> None:
        """Discard what was computed in a step that the user's code has left before it was complete."""
        self._buffers.restore_start()
        _clear({**dict.fromkeys(self.replica.module.parameters()), **dict.fromkeys(self.parameters())})

    def end(self) -> StepResult:
        """After the last lane: the numbers of the step. All ranks."""
        if self.hooks.has_seen_plain:  # such a loop calls no `step`
            self._end_first_step()
        self._buffers.finish()
        if self.guard is not None and self._is_bad is not None:
            self.guard.undo_if(self._is_bad)
        elif self.guard is not None and self._is_skipped:
            self._skip(self.guard)
        elif self.guard is not None and self._is_updated:
            self.guard.count_good()
        self.replica.share_buffers()
        if self.ema is not None and self._is_updated:
            self.ema.update(self._is_bad)
        self._early = self._repeated_sums()
        self.clock.enter(OTHER)
        losses = [number for pair in self._all_totals() for number in pair]
        return StepResult.of(losses, self._norm, self._is_bad if self._is_bad is not None else 0)

    def _end_first_step(self) -> None:
        """Treat those frozen parameters like buffers that the forward passes of the first step have changed. All ranks.

        A teacher that the user's code moves after the update is not among them: it moves on all ranks in the same way.
        """
        if not self._is_first:
            return
        self._is_first = False
        changed = self.world.gather_objects(self._buffers.changed_weights())
        self.replica.forward_state.set_moving(key for of_rank in changed for key in of_rank)

    def _all_totals(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The sum and the count of each lane's loss."""
        zero = number_on(0, self.world.device)
        return [(zero, zero) if pair is None else pair for pair in self._totals]

    def _repeated_sums(self) -> GradientSums | None:
        """The sums of a loop with one `backward` and one `step` for each batch, which can be sent during backward."""
        optimizer = self.calls.only_optimizer(len(self._lanes))
        can_send = optimizer is not None and self.world.size > 1 and not self.hooks.is_split
        return self._sums[optimizer] if optimizer is not None and can_send else None

    # --- called by the user's code -----------------------------------------------------------------------------

    def backward(self, loss: Any) -> None:
        """Compute the gradients of a lane's loss, weighted by the samples of the lane. All ranks."""
        lane = self._present("run.backward(loss)")
        self.calls.backward(loss)
        weight = (self.guard.scale if self.guard is not None else 1.0) / lane.step_samples
        if self.calls.has_own_count:
            value, count = sum_and_count(loss, 0, "run.backward")
            total = value.detach()
        else:
            value, count = mean_of(loss, "run.backward"), len(lane.indices)
            total, weight = value.detach() * count, weight * count
        if not value.requires_grad:
            raise ConfigError(
                "run.backward(loss) got a loss that depends on no trainable parameter; do not detach it or compute it "
                "under torch.no_grad(), and look whether the parameters are frozen"
            )
        if lane.samples:
            self._add_loss(lane, total, number_on(count, self.world.device))
        sent: GradientSums | None = None
        if self._early is not None and lane is self._lanes[-1]:
            if self.calls.count_backward() == len(self._lanes):
                self._early.expect(is_empty=not lane.samples, flag=self._flag())
                sent = self._early
            else:  # a further loss, which was not there in the step before
                self._early.cancel()
        self.clock.enter(BACKWARD)
        with self.hooks.sending(sent):
            value.backward(number_on(weight, self.world.device, value.dtype))  # type: ignore[no-untyped-call]
        self.hooks.note_gradients()
        self.clock.enter(FORWARD)

    def step(self, optimizer: torch.optim.Optimizer, clip_norm: float | None, clip_value: float | None = None) -> bool:
        """Add this lane's gradients; with the last lane, sum over ranks and update the weights. All ranks."""
        lane = self._present("run.step(optimizer)")
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not limit > 0:
                raise ConfigError(f"run.step(…, {name}={limit}) must be a number above 0, or None")
        self.calls.step(optimizer)
        sums = self._sums_of(optimizer)
        if lane is not self._lanes[-1]:
            if lane.samples:
                sums.add()
            self._clear(sums.parameters)
            return False
        self.clock.enter(REDUCTION)
        sums.finish(is_empty=not lane.samples, flag=self._flag())
        self.clock.enter(OPTIMIZER)
        if self.calls.has_own_count:
            self._divide_by_count(sums.parameters)
        self._update(optimizer, sums.parameters, clip_norm, clip_value)
        self._clear(sums.parameters)
        self._buffers.finish_early()
        self._end_first_step()
        self.clock.enter(FORWARD)
        return True

    def include(self, name: str, module: torch.nn.Module) -> None:
        """Treat a further module like the model: rank 0's weights, buffers of lane 0, sums of gradients. All ranks."""
        self.replica.include(name, module)
        self._modules.append(module)
        self._late = None  # its buffers are not new
        self.hooks.watch(module.parameters())

    def counters(self) -> dict[str, float]:
        """The numbers on which steps depend, besides weights, optimizers and averages, for a checkpoint."""
        return self.guard.counters() if self.guard is not None else {}

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all optimizers that have stepped."""
        return [parameter for sums in self._sums.values() for parameter in sums.parameters]

    def watch_again(self) -> None:
        """Watch parameters that have become trainable. All ranks."""
        self.hooks.watch(self.replica.module.parameters())

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Release the memory for the sums of an optimizer that another one has replaced."""
        self._sums.pop(optimizer, None)

    # --- the parts of a step -----------------------------------------------------------------------------------

    def _present(self, call: str) -> Lane:
        if self.lane is None:
            raise ConfigError(f"{call} was called outside a batch of train_loader, so its samples are not known")
        return self.lane

    def _place(self, lane: Lane) -> int:
        return self.rank_lanes.place_of(lane.lane)

    def _flag(self) -> torch.Tensor | None:
        """The flag added to a gradient so that all ranks see a loss that is not finite; a single rank checks losses."""
        return self.guard.nan_flag if self.guard is not None and self.world.size > 1 else None

    def _add_loss(self, lane: Lane, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add to the loss of the lane; several losses of one batch are one sum."""
        if self.guard is not None and self.world.size > 1:
            self.guard.check_loss(total)
        before = self._totals[self._place(lane)]
        self._totals[self._place(lane)] = (total if before is None else before[0] + total), count

    def _clear(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        _clear(parameters)
        self.hooks.forget_gradients(parameters)

    def _check_owner(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Reject an optimizer of another model, whose weights would be neither saved nor compared between the ranks."""
        known = {parameter for module in self._modules for parameter in module.parameters()}
        if known.isdisjoint(parameters):
            raise ConfigError(
                "run.step(optimizer) got an optimizer without any parameter of the model; create it from the model "
                "that train_fn receives, or name the other module in run.track(…)"
            )

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> GradientSums:
        """The sums of the parameters of an optimizer. All ranks, when it steps for the first time."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._sums.get(optimizer)
        # A group may have been added, or a parameter replaced.
        if known is None or len(known.parameters) != len(parameters) or any(map(is_not, known.parameters, parameters)):
            self._check_owner(parameters)
            self.hooks.watch(parameters)
            self._sums[optimizer] = GradientSums(parameters, self.reduction)
        return self._sums[optimizer]

    def _update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], clip_norm: float | None,
        clip_value: float | None,
    ) -> None:  # fmt: skip
        """Check the sums, clip them and update the weights. All ranks."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        losses = [total.clone() for total, _ in self._all_totals()] if self.world.size == 1 else []
        if self.guard is not None and self._can_defer():
            is_bad = nonfinite_flag([*gradients, *losses])
            self.guard.defer(can_skip=can_skip(optimizer))
            if can_skip(optimizer):
                optimizer.found_inf = is_bad  # type: ignore[attr-defined]
            self._is_bad = is_bad if self._is_bad is None else torch.maximum(self._is_bad, is_bad)
        elif self.guard is not None and not self.guard.allows([*gradients, *losses]):
            self._is_skipped = True  # the scale of fp16 changes at the end of the step, after other optimizers
            return
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        if clip_norm is not None:
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        self._is_updated = True

    def _can_defer(self) -> bool:
        """Whether the device checks the numbers; on a GPU, the host would wait for each step."""
        return self.world.device.type == "cuda" and self.settings.nan == "skip" and self.settings.precision != "fp16"

    def note_lr(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rate of a step; a tensor on a GPU is not read, which would wait for the device."""
        lr = optimizer.param_groups[0]["lr"]
        if not isinstance(lr, torch.Tensor) or lr.device.type != "cuda":
            self.lr = float(lr)

    def _skip(self, guard: Guard) -> None:
        """Warn of a step with an update that was left out, because its numbers were not finite. All ranks."""
        totals = torch.stack([torch.stack((total, count.to(total))) for total, count in self._all_totals()])
        guard.skip(self._lanes[0].step, self._lanes, totals, None)
        self._totals = [None] * self.rank_lanes.most

    def _divide_by_count(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Divide the gradients by the sum of the losses' own counts instead of the number of samples. All ranks."""
        counts = torch.stack([count.double() for _, count in self._all_totals()])
        # In the order of the lanes at any number of ranks.
        total = self.rank_lanes.in_order(torch.cat(self.world.gather_equal(counts))).sum()
        factor = torch.where(total == 0, 0.0, self._lanes[0].step_samples / total)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _clear(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
