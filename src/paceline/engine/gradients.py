"""The gradients of a step: forward and backward of this rank's lanes, summed over lanes and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane
from paceline.engine.buffers import LOSS, Copies, Name
from paceline.engine.clock import BACKWARD, FORWARD, REDUCTION, PhaseClock
from paceline.engine.losses import mean_of, number_on, sum_and_count
from paceline.engine.nonfinite import Guard
from paceline.engine.precision import HALF, autocast
from paceline.engine.reduce import BucketHook, Gradients, LaneSum, Reduction, cast, reduce_after_backward, reduce_bucket
from paceline.engine.replica import Replica, Single, run_model
from paceline.errors import ConfigError, UnusedParameters
from paceline.world import World

ROUND = 32  # bytes: four numbers of up to 64 bits, which kernels read at once
# How torch says that an operator does not know a number format; the second is oneDNN's, of LSTM in fp16 on a CPU.
NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|could not create a primitive")


class Backward:
    """Rides the lanes of a step; then the parameters hold the gradients of the whole step, on all ranks.

    Three ways to the sum over ranks: DDP's buckets while backward goes on (`hook`); after backward, where only some
    lanes may use a parameter; none at all in a single process.
    """

    def __init__(
        self,
        replica: Replica | Single,
        settings: Settings,
        feed: Feed,
        guard: Guard | None,
        *,
        lanes_per_rank: int,
        world: World,
        clock: PhaseClock,
        through_ddp: bool,
    ) -> None:
        """All ranks."""
        self.replica, self.settings, self.feed, self.guard, self.world = replica, settings, feed, guard, world
        self.clock = clock
        self.loss_fn = settings.function("loss_fn")
        self.named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self._all = list(replica.module.parameters())  # somebody may make more of them trainable
        self.lane_sum, self.lanes_per_rank = LaneSum(lanes_per_rank), lanes_per_rank
        self.reduction = Reduction(world, settings.exact, settings.compression)
        self._buffers, self._before, self._after_first = replica.forward_state, Copies(), Copies()
        self._watched = self._buffers.parameters()
        self._goes_back = False  # to a copy of the buffers
        self._votes = guard is not None and world.size > 1  # or the losses of a single rank speak for themselves
        self.hook: BucketHook | None = None
        # DDP must know what is unused before the other lanes have run.
        if through_ddp and isinstance(replica, Replica) and not settings.find_unused_parameters:
            vote = guard.vote if self._votes and guard else None
            self.hook = BucketHook(self.parameters, self.reduction, vote, lambda: clock.enter(REDUCTION))
            replica.on_buffers = self._on_buffers
            replica.register_comm_hook(self.hook, reduce_bucket)
        self.model: Callable[..., Any] = replica if self.hook is not None else replica.module
        self._value_of = _value_of
        if settings.step_mode == "compile" and self.hook is None:
            self._value_of = torch.compile(_value_of, dynamic=False)  # model and loss fused into each other
        elif settings.step_mode == "compile":
            replica.module.compile(dynamic=False)
            self.loss_fn = torch.compile(self.loss_fn, dynamic=False)

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Before the lanes of a step."""
        for parameter in self._all:  # as zero_grad does, in less time
            parameter.grad = None
        self.lane_sum.restart()
        self._is_used = [False] * len(self.parameters)
        zero = number_on(0, self.world.device)
        self._lanes, self._totals, self._counts_itself = lanes, [(zero, zero)] * self.lanes_per_rank, False
        # Every lane begins with the buffers of the step's beginning, such as BatchNorm's statistics. They end as the
        # first lane of a rank leaves them, or stay if it is empty. Rank 0's, which is lane 0, are the ones that count.
        self._follows_first = lanes[0].samples > 0 and lanes[0].lane % self.lanes_per_rank == 0
        self._goes_back = len(lanes) > 1 or not self._follows_first

    def ride(self, lane: Lane, inputs: LaneInputs) -> None:
        """Forward and backward of the next lane; the last one's sums over ranks begin here. All ranks."""
        is_first, is_last, place = lane is self._lanes[0], lane is self._lanes[-1], lane.lane % self.lanes_per_rank
        if is_first and self.hook is None and self.world.size > 1:
            self.clock.enter(REDUCTION)
            self.replica.share_buffers()
        if not is_first:
            self._before.put_back(self._buffers.live())
        elif self._goes_back:
            self._before.take(self._buffers.live())
        versions = self._versions() if is_first else []
        is_reducing = is_last and self.hook is not None
        if is_reducing and self.hook is not None:
            self.hook.begin(self.lane_sum.remaining(place), is_empty=not lane.samples)
        with nullcontext() if is_reducing or self.hook is None else self.replica.no_sync():
            total, count = self._forward_backward(lane, inputs, self.model)
        for name, parameter, version in versions:
            if parameter._version != version:
                text = ".".join(filter(None, name)).replace(LOSS, "loss_fn")
                raise ConfigError(
                    f"{text} is frozen and was changed in step {lane.step + 1}, which the forward pass before the "
                    "first step did not show; make it a buffer (register_buffer), which may change at any time"
                )
        if lane.samples:
            self._totals[place] = total, count
            if not is_reducing:
                self._add_to_sum(place, is_last)
        if is_first and self._goes_back and self._follows_first:
            self._after_first.take(self._buffers.live())

    def finish(self) -> list[torch.Tensor]:
        """After the last lane: the gradients of the step, and each lane's loss as its sum and its count. All ranks."""
        if self._goes_back:
            (self._after_first if self._follows_first else self._before).put_back(self._buffers.live())
        if self.hook is None and self.settings.find_unused_parameters:
            self._reduce_after_backward()
        elif self.hook is not None and self.hook.reduced != sum(p.numel() for p in self.parameters):
            raise UnusedParameters([name for name, p in self.named if p.grad is None])
        if self.settings.exact and self.world.size > 1 and self.world.device.type == "cuda":
            self._begin_at_round_addresses()
        if self._counts_itself:
            # In one format on all ranks: a count may be any kind of tensor, that of an empty lane is a float.
            self._divide_by_count(torch.stack([count.double() for _, count in self._totals]))
        return [number for pair in self._totals for number in pair]

    def sums(self) -> Gradients:
        """What must be finite: the gradients, which hold the votes of all ranks; for a single rank its losses, too."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        losses = [total for total, _ in self._totals]
        if self.settings.precision == "fp16":  # where the check divides what it looks at
            losses = [loss.clone() for loss in losses]
        return gradients if self._votes else [*gradients, *losses]

    def alone(self, lane: Lane, inputs: LaneInputs) -> Gradients:
        """The gradients of one lane, added to nothing. DDP takes no part."""
        for parameter in self._all:
            parameter.grad = None
        self._forward_backward(lane, inputs, self.replica.module)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _forward_backward(
        self, lane: Lane, inputs: LaneInputs, model: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss's sum and its count; the gradients are left in the parameters."""
        self.clock.enter(FORWARD)
        batch = self.feed.batch(inputs)
        with self._stance(lane), _explained(self.settings.precision):
            with autocast(self.settings.precision, self.world.device):
                value = self._value_of(model, self.loss_fn, batch)
            self._counts_itself = isinstance(value, (tuple, list))
            weight = (self.guard.scale if self.guard is not None else 1.0) / lane.step_samples
            if self._counts_itself:
                loss, count = sum_and_count(value, 0, "loss_fn")
                total = loss.detach()
            else:
                loss, count = mean_of(value, "loss_fn"), len(lane.indices)
                total, weight = loss.detach() * count, weight * count
            if self._votes and self.guard is not None and lane.samples:
                self.guard.see(total)
            self.clock.enter(BACKWARD)
            loss.backward(number_on(weight, self.world.device, loss.dtype))  # type: ignore[no-untyped-call]
        return total, number_on(count, self.world.device)

    def _stance(self, lane: Lane) -> AbstractContextManager[Any]:
        """Compiled code is for one size of lanes; a smaller one is not worth compiling for."""
        is_whole = self.settings.step_mode != "compile" or len(lane.indices) == self.settings.batch_size
        return nullcontext() if is_whole else torch.compiler.set_stance("force_eager")

    def _versions(self) -> list[tuple[Name, torch.Tensor, int]]:
        """How often each frozen parameter was written to, of those that are not copied for each lane."""
        if self.lanes_per_rank * self.world.size == 1:
            return []
        return [
            (name, parameter, parameter._version)
            for name, parameter in self._watched.items()
            if not parameter.requires_grad and name not in self._buffers.moving and not parameter.is_inference()
        ]

    def _on_buffers(self, is_begun: bool) -> None:
        """DDP brings rank 0's buffers, or has brought them."""
        self.clock.enter(REDUCTION if is_begun else FORWARD)
        if self._goes_back and not is_begun:
            self._before.take(self._buffers.live())

    def _add_to_sum(self, place: int, is_last: bool) -> None:
        """Put the gradients of the lane that has just run where they belong in the tree."""
        missing = [name for name, p in self.named if p.grad is None]
        if missing and not self.settings.find_unused_parameters:
            raise UnusedParameters(missing)
        if is_last and not self.settings.find_unused_parameters:  # they stay in the parameters, and take the others in
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            for branch in self.lane_sum.remaining(place):
                torch._foreach_add_(gradients, branch)
            return
        taken = []
        for number, parameter in enumerate(self.parameters):
            self._is_used[number] |= parameter.grad is not None
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self.lane_sum.add(place, taken)

    def _reduce_after_backward(self) -> None:
        """Where only some lanes may use a parameter. All ranks."""
        self.clock.enter(REDUCTION)
        total: Gradients | None = None
        for branch in self.lane_sum.remaining(self.lanes_per_rank):
            if total is not None:
                torch._foreach_add_(total, branch)
            total = total or branch
        gradients = [
            total[place] if total is not None and is_used else None for place, is_used in enumerate(self._is_used)
        ]
        mine = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        if self._votes and self.guard is not None and mine:
            cast(self.guard.vote, mine[0])
        summed = reduce_after_backward(
            gradients, self.parameters, self.reduction, bucket_bytes=self.settings.bucket_mb * 2**20
        )
        for parameter, gradient in zip(self.parameters, summed, strict=True):
            parameter.grad = gradient

    def _begin_at_round_addresses(self) -> None:
        """Lay gradients as they lie on a single rank, where each has memory of its own.

        Those of several are parts of a bucket. A GPU reads what does not begin at a round address one by one, and sums
        it up in another order: a norm, by which gradients are clipped, would have other last bits. What follows a
        tensor of an odd size in its bucket, such as the bias of ten classes, is copied.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() % ROUND:
                parameter.grad = parameter.grad.clone()

    def _divide_by_count(self, counts: torch.Tensor) -> None:
        """Gradients so far are of the sum over samples; make them of the sum over what the loss counted. All ranks."""
        # All lanes in their order, then one sum: it is the same at any number of ranks.
        total = torch.cat(self.world.gather_equal(counts)).sum()
        # Nothing counted, nothing learnt.
        factor = torch.where(total == 0, 0.0, self._lanes[0].step_samples / total)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _value_of(model: Callable[..., Any], loss_fn: Callable[..., Any], batch: Any) -> Any:
    """What the loss function makes of a batch."""
    output, target = run_model(model, batch)
    return loss_fn(output, target)


@contextmanager
def _explained(precision: str) -> Iterator[None]:
    """An operator that this device does not have, or cannot repeat, is an error of torch; say what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if precision in HALF and NO_KERNEL.search(str(error)):
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
