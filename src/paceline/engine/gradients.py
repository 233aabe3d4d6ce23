"""The gradients of a step: forward and backward of this rank's lanes, summed over lanes and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane, RankLanes
from paceline.engine.bucket_hook import BucketHook
from paceline.engine.clock import BACKWARD, FORWARD, REDUCTION, PhaseClock
from paceline.engine.compiled_lanes import CompiledObjective, explaining_compiler
from paceline.engine.cuda_graph import AsRecorded
from paceline.engine.forward_state import LOSS_PREFIX, ParameterKey, Snapshot
from paceline.engine.integer_sum import Gradients
from paceline.engine.lane_values import LaneValues
from paceline.engine.losses import mean_of, number_on, sum_and_count
from paceline.engine.nonfinite import Guard
from paceline.engine.objective import Objective, objectives_of, parts_of
from paceline.engine.precision import HALF_DTYPES, autocast
from paceline.engine.reduce import (
    LaneGradients,
    add_flag,
    reduction_of,
    sum_after_backward,
    sum_on_one_rank,
)
from paceline.engine.replica import PlainModel, Replica
from paceline.engine.sharding import Sharding
from paceline.errors import ConfigError, UnusedParameters
from paceline.world import World

ALIGNMENT_BYTES = 32  # four numbers of up to 64 bits, which kernels read at once
# Torch's messages for an operator without a kernel for a dtype; the second is oneDNN's, for LSTM in fp16 on a CPU.
NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|could not create a primitive")
TWO_KINDS = (
    "{key} returned a mean for one batch and a sum with its count for another; return the same kind each time, "
    "paceline.Sum(loss * n, n) where the loss is a mean over n"
)


class Backward:
    """Runs the lanes of a step; then the parameters hold the gradients of the whole step.

    Gradients are summed over ranks in DDP's buckets while backward runs (`hook`), or after backward where only some
    lanes may use a parameter. A single process sums nothing.
    """

    def __init__(
        self,
        replica: Replica | PlainModel,
        settings: Settings,
        feed: Feed,
        guard: Guard | None,
        *,
        world: World,
        clock: PhaseClock,
        through_ddp: bool,
        objective: Objective | None = None,
        optimized: Collection[torch.Tensor] | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Only the gradients of `optimized` are summed and kept, if it is given; all of them otherwise. All ranks.

        With `sharding`, a rank has only the gradients of its own parameters in the end.
        """
        self.replica, self.settings, self.feed, self.guard, self.world = replica, settings, feed, guard, world
        self.clock, self.autocast = clock, autocast(settings.precision, world.device)
        may_record = world.device.type == "cuda" and settings.step_mode != "eager"  # the same on any number of ranks
        self._as_recorded = AsRecorded() if may_record else nullcontext()
        self.objective = objective or objectives_of(settings)[""]
        trainable = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.named = [(name, p) for name, p in trainable if optimized is None or p in optimized]
        self.parameters = [parameter for _, parameter in self.named]
        self._all = list(replica.module.parameters())  # the user's code may make more of them trainable
        kept = set(self.parameters)
        self._dropped = [parameter for parameter in self._all if optimized is not None and parameter not in kept]
        # DDP would wait for the gradients of all parameters, and must know what is unused before the other lanes run.
        self._sums_after_backward = settings.find_unused_parameters or optimized is not None
        self.rank_lanes = RankLanes(settings.lanes, world.size, world.rank)
        self.values = LaneValues(self.rank_lanes, world, self.objective)
        self._lane_values: dict[str, Any] = {}  # of the lane that has run last
        self._has_own_count: bool | None = None  # whether the loss is a sum with its count
        self._is_kind_agreed = world.size == 1
        self._sharding = sharding
        owner_of = sharding.owner_of if sharding is not None else None
        self.reduction = reduction_of(world, settings, exact=settings.exact, clock=clock, owner_of=owner_of)
        self.finished = LaneGradients(keeps_each=self.reduction.uses_integers)
        self._buffers, self._before, self._after_first = replica.forward_state, Snapshot(), Snapshot()
        self._watched = self._buffers.parameters()
        self._restores_buffers = False  # whether lanes start from a copy of the buffers
        self._uses_flag = guard is not None and world.size > 1  # a single rank checks its losses themselves
        self.hook: BucketHook | None = None
        if through_ddp and isinstance(replica, Replica) and not self._sums_after_backward:
            nan_flag = guard.nan_flag if self._uses_flag and guard else None
            self.hook = BucketHook(self.parameters, self.reduction, nan_flag, lambda: clock.enter(REDUCTION))
            replica.on_buffers = self._on_buffers
            replica.register_comm_hook(self.hook, BucketHook.reduce)
        self.model: Callable[..., Any] = replica if self.hook is not None else replica.module
        self.compiled: CompiledObjective | None = None  # the objective, if lanes are compiled

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Prepare for the lanes of a step."""
        for parameter in self._all:  # does what zero_grad does, in less time
            parameter.grad = None
        self.finished.restart()
        self._is_used = [False] * len(self.parameters)
        self.used: list[torch.nn.Parameter] = []  # have a gradient in this step, though perhaps on another rank
        zero = number_on(0, self.world.device)
        self._lanes, self._totals = lanes, [(zero, zero)] * self.rank_lanes.most
        self.values.restart()
        # Every lane starts with the buffers of the step's start, such as BatchNorm's statistics. After the step they
        # are those of a rank's first lane, or unchanged if that is empty. Rank 0's first lane is lane 0, and its
        # buffers are sent to the other ranks.
        self._keeps_first = lanes[0].samples > 0 and self.rank_lanes.place_of(lanes[0].lane) == 0
        self._restores_buffers = len(lanes) > 1 or not self._keeps_first

    def run_lane(self, lane: Lane, inputs: LaneInputs) -> None:
        """Run forward and backward of the next lane; with the last lane, start the sums over ranks. All ranks."""
        is_first, is_last = lane is self._lanes[0], lane is self._lanes[-1]
        if is_first and self.hook is None and self.world.size > 1:
            self.clock.enter(REDUCTION)
            self.replica.share_buffers()
        if not is_first:
            self._before.restore(self._buffers.tensors())
        elif self._restores_buffers:
            self._before.take(self._buffers.tensors())
        versions = self._versions() if is_first else []
        is_reducing = is_last and self.hook is not None
        if is_reducing and self.hook is not None:
            self.hook.begin(self.finished.lanes, is_empty=not lane.samples)
        with nullcontext() if is_reducing or self.hook is None else self.replica.no_sync():
            total, count = self._forward_backward(lane, inputs, self.model)
        for name, parameter, version in versions:
            if parameter._version != version:
                text = ".".join(filter(None, name)).replace(LOSS_PREFIX, "loss_fn")
                raise ConfigError(
                    f"{text} is frozen and was changed in step {lane.step + 1}, which the forward pass before the "
                    "first step did not show; make it a buffer (register_buffer), which may change at any time"
                )
        if lane.samples:
            self._totals[self.rank_lanes.place_of(lane.lane)] = total, count
            self.values.add(lane.lane, self._lane_values, len(lane.indices))
            if not is_reducing:
                self._take_gradients(is_last)
        if is_first and self._restores_buffers and self._keeps_first:
            self._after_first.take(self._buffers.tensors())

    def finish(self) -> list[torch.Tensor]:
        """Complete the gradients after the last lane; return the sum and the count of each lane's loss. All ranks.

        The further values of the lanes are in `values`.
        """
        if self._restores_buffers:
            (self._after_first if self._keeps_first else self._before).restore(self._buffers.tensors())
        if self._sums_after_backward:
            self._sum_after_backward()
        elif self.hook is not None and self.hook.reduced != sum(p.numel() for p in self.parameters):
            raise UnusedParameters([name for name, p in self.named if p.grad is None])
        self.used = [parameter for parameter in self.parameters if parameter.grad is not None]
        if self._sharding is not None:
            self._sharding.drop_others(self.used)
        if self.settings.exact and self.world.size > 1 and self.world.device.type == "cuda":
            self._align_gradients()
        self._agree_on_kind()
        if self._has_own_count:
            # In one dtype on all ranks: a count may have any dtype, that of an empty lane is a float.
            self._divide_by_count(torch.stack([count.double() for _, count in self._totals]))
        return [number for pair in self._totals for number in pair]

    def sums(self) -> Gradients:
        """The tensors that must be finite: the gradients, with the NaN flags of all ranks, or also losses."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        losses = [total for total, _ in self._totals]
        if self.settings.precision == "fp16":  # the check divides the tensors in place
            losses = [loss.clone() for loss in losses]
        return gradients if self._uses_flag else [*gradients, *losses]

    def lane_gradients(self, lane: Lane, inputs: LaneInputs) -> Gradients:
        """The gradients of one lane alone, without DDP."""
        for parameter in self._all:
            parameter.grad = None
        self._forward_backward(lane, inputs, self.replica.module)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _forward_backward(
        self, lane: Lane, inputs: LaneInputs, model: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one lane and return the sum and the count of its loss; the gradients are left in the parameters."""
        self.clock.enter(FORWARD)
        batch, source = self.feed.batch(inputs), self.objective.key
        with explaining_compiler(), explaining_errors(self.settings.precision):
            with self.autocast, self._as_recorded:
                value, self._lane_values = parts_of(self._value_of(model, lane, batch), source)
            if self._has_own_count is None:
                self._has_own_count = isinstance(value, (tuple, list))
            elif self._has_own_count != isinstance(value, (tuple, list)):
                raise ConfigError(TWO_KINDS.format(key=source))
            weight = (self.guard.scale if self.guard is not None else 1.0) / lane.step_samples
            if self._has_own_count:
                loss, count = sum_and_count(value, 0, source)
                total = loss.detach()
            else:
                loss, count = mean_of(value, source), len(lane.indices)
                total, weight = loss.detach() * count, weight * count
            if self._uses_flag and self.guard is not None and lane.samples:
                self.guard.check_loss(total)
            self.clock.enter(BACKWARD)
            if not loss.requires_grad:
                raise ConfigError(
                    f"{source} returned a loss without a gradient; compute it from the model's output, without detach, "
                    "item or float, and not under no_grad"
                )
            loss.backward(number_on(weight, self.world.device, loss.dtype))  # type: ignore[no-untyped-call]
        return total, number_on(count, self.world.device)

    def _agree_on_kind(self) -> None:
        """In the first step, refuse a loss that is a mean on some ranks and a sum on others. All ranks."""
        if not self._is_kind_agreed:
            self._is_kind_agreed = True
            if len(set(self.world.gather_objects(self._has_own_count))) > 1:
                raise ConfigError(TWO_KINDS.format(key=self.objective.key))

    def _value_of(self, model: Callable[..., Any], lane: Lane, batch: Any) -> Any:
        """The value of the objective; all ranks, if the model is in DDP."""
        objective = self.objective if self.compiled is None else self.compiled.for_lane(lane, batch)
        if isinstance(model, Replica) and objective.takes_model:
            return model.run_step(objective, batch)
        return objective(model, batch)

    def _versions(self) -> list[tuple[ParameterKey, torch.Tensor, int]]:
        """The version counter of each frozen parameter that is not copied for each lane."""
        if self.settings.lanes == 1:
            return []
        return [
            (name, parameter, parameter._version)
            for name, parameter in self._watched.items()
            if not parameter.requires_grad and name not in self._buffers.moving and not parameter.is_inference()
        ]

    def _on_buffers(self, is_begun: bool) -> None:
        """Called before DDP broadcasts rank 0's buffers, and after."""
        self.clock.enter(REDUCTION if is_begun else FORWARD)
        if self._restores_buffers and not is_begun:
            self._before.take(self._buffers.tensors())

    def _take_gradients(self, is_last: bool) -> None:
        """Keep the gradients of the lane that has just run, or with the last lane of the only rank, sum all of them."""
        missing = [name for name, p in self.named if p.grad is None]
        if missing and not self.settings.find_unused_parameters:
            raise UnusedParameters(missing)
        for parameter in self._dropped:
            parameter.grad = None
        if is_last and not self._sums_after_backward:
            sum_on_one_rank(self.parameters, self.finished.lanes, self.reduction)
            return
        taken = []
        for number, parameter in enumerate(self.parameters):
            self._is_used[number] |= parameter.grad is not None
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self.finished.add(taken)

    def _sum_after_backward(self) -> None:
        """Sum gradients over lanes and ranks where only some lanes may use a parameter. All ranks."""
        self.clock.enter(REDUCTION)
        lanes = self.finished.lanes
        if self._uses_flag and self.guard is not None and lanes:
            used = [gradient for gradient, is_used in zip(lanes[0], self._is_used, strict=True) if is_used]
            add_flag(self.guard.nan_flag, used)
        summed = sum_after_backward(lanes, self._is_used, self.parameters, self.reduction)
        for parameter, gradient in zip(self.parameters, summed, strict=True):
            parameter.grad = gradient

    def _align_gradients(self) -> None:
        """Copy gradients that start at unaligned addresses into memory of their own, as on a single rank.

        On several ranks, gradients are parts of a bucket. A GPU reads an unaligned tensor element by element and sums
        it in another order, so a norm, by which gradients are clipped, would have other last bits. Gradients that
        follow a tensor of an odd size in their bucket, such as the bias of ten classes, are unaligned.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() % ALIGNMENT_BYTES:
                parameter.grad = parameter.grad.clone()

    def _divide_by_count(self, counts: torch.Tensor) -> None:
        """Divide the gradients by the sum of the loss's own counts instead of the number of samples. All ranks."""
        # All lanes in their order, then one sum: it is the same at any number of ranks.
        total = self.rank_lanes.in_order(torch.cat(self.world.gather_equal(counts))).sum()
        # If nothing was counted, the gradients are zero.
        factor = torch.where(total == 0, 0.0, self._lanes[0].step_samples / total)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@contextmanager
def explaining_errors(precision: str) -> Iterator[None]:
    """Replace torch's error about an operator that is missing or not deterministic on this device by a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if precision in HALF_DTYPES and NO_KERNEL.search(str(error)):
            raise ConfigError(
                f"precision={precision} but an operator has no kernel for it on this device "
                f"({str(error).splitlines()[0]}); use another precision"
            ) from error
        if "does not have a deterministic implementation" not in str(error):
            raise
        operator = str(error).split()[0]
        raise ConfigError(
            f"exact=true but {operator} cannot be repeated to the last bit on this device; use another operator, "
            "or set exact: false"
        ) from error
