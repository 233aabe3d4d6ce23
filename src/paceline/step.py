"""One optimizer step over this rank's lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import Config
from paceline.data.loader import Lane, to_device
from paceline.ema import Ema
from paceline.errors import ConfigError, DataError, UnusedParameters
from paceline.guard import Guard
from paceline.metrics import sum_and_count
from paceline.precision import autocast
from paceline.randomness import seed_generators
from paceline.reduce import BucketHook, Gradients, LaneSum, Reduction, cast, reduce_after_backward, reduce_bucket
from paceline.replica import Replica, Single
from paceline.world import World

# How torch says that an operator does not know a number format; the second is oneDNN's, of LSTM in fp16 on a CPU.
NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|could not create a primitive")


class Stepper:
    """Takes the lanes of a step through forward, backward, reduction and update."""

    def __init__(
        self,
        replica: Replica | Single,
        optimizer: torch.optim.Optimizer,
        config: Config,
        *,
        lr_factor: Callable[[int], float],
        lanes_per_rank: int,
        world: World,
        on_bad: Callable[[str], None],
        original: Callable[[Sequence[int]], list[int]] = list,
    ) -> None:
        """`on_bad` and `original` tell of steps that are not finite (guard.py). All ranks."""
        self.replica, self.optimizer, self.config, self.world = replica, optimizer, config, world
        self.loss_fn, self.lr_factor = config.function("loss_fn"), lr_factor
        optimizer.zero_grad()  # the first call makes torch load its compiler, which is not part of the first step
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.ema = Ema(replica.module, config.ema) if config.ema is not None else None
        self.guard: Guard | None = None
        if config.nan != "off" or config.precision == "fp16":
            self.guard = Guard(replica.module, config, world, on_bad=on_bad, original=original)
        self.lane_sum, self.lanes_per_rank = LaneSum(lanes_per_rank), lanes_per_rank
        self.reduction = Reduction(world, config.exact)
        # DDP reduces while backward goes on, but it must know what is unused before the other lanes have run.
        self.hook = None
        if isinstance(replica, Replica) and not config.find_unused_parameters:
            self.hook = BucketHook(self.parameters, self.reduction, self.guard.vote if self.guard else None)
            replica.register_comm_hook(self.hook, reduce_bucket)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, as of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def counters(self) -> dict[str, float]:
        """What steps depend on beside weights, optimizer and averages, as plain numbers."""
        return self.guard.counters() if self.guard is not None else {}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Go on from what `counters` gave."""
        if self.guard is not None:
            self.guard.set_counters(counters)

    def take(self, step: int, lanes: Sequence[Lane]) -> torch.Tensor:
        """One update, unless the step is not finite: then nothing changes. All ranks.

        Returns the loss's sum and count for each lane of this rank, on the device; zeros for a step that was skipped.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.lr_factor(step)
        if self.guard is not None:
            self.guard.begin()
        totals, counts_itself = self._backward(lanes)
        if counts_itself:
            self._divide_by_count(totals[:, 1], lanes[0].step_samples)
        # Before clipping, whose norm would spread one NaN over everything.
        if self.guard is not None and not self.guard.allows(self._gradients()):
            self.guard.skip(step, lanes, totals, self._ride_alone)
            return torch.zeros_like(totals)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return totals

    def _backward(self, lanes: Sequence[Lane]) -> tuple[torch.Tensor, bool]:
        """The gradients of the whole step, on all ranks. All ranks."""
        if self.hook is None:
            self.replica.share_buffers()
        self.lane_sum.restart()
        self._is_used = [False] * len(self.parameters)
        totals = torch.zeros(self.lanes_per_rank, 2, device=self.world.device)
        # BatchNorm's statistics follow the first lane of a rank; rank 0's, which is lane 0, are the ones that count.
        # Where it is empty they stay as they are.
        has_first = lanes[0].samples > 0 and lanes[0].lane % self.lanes_per_rank == 0
        statistics = [] if has_first else [buffer.clone() for buffer in self.replica.module.buffers()]
        counts_itself = False
        for lane in lanes:
            place = lane.lane % self.lanes_per_rank
            is_reducing = self.hook is not None and lane is lanes[-1]
            if self.hook is not None and is_reducing:
                self.hook.begin(self.lane_sum.remaining(place), is_empty=not lane.samples)
            with nullcontext() if is_reducing else self.replica.no_sync():
                total, count, counts_itself = self._ride(lane, self.replica)
            if lane.samples:
                totals[place, 0], totals[place, 1] = total, count
                if not is_reducing:
                    self.lane_sum.add(place, self._take_gradients())
            if has_first and lane is lanes[0] and len(lanes) > 1:
                statistics = [buffer.clone() for buffer in self.replica.module.buffers()]
        for buffer, kept in zip(self.replica.module.buffers(), statistics, strict=bool(statistics)):
            buffer.copy_(kept)
        if self.hook is None:
            self._reduce_after_backward()
        elif self.hook.reduced != sum(p.numel() for p in self.parameters):
            raise UnusedParameters([name for name, p in self.named if p.grad is None])
        return totals, counts_itself

    def _ride(self, lane: Lane, model: Callable[..., Any]) -> tuple[torch.Tensor, Any, bool]:
        """Forward and backward of one lane: the loss's sum, its count, and whether the loss counted by itself."""
        batch = to_device(lane.data, self.world.device)
        seed_generators(self.config.seed, "forward", lane.step, lane.lane)
        with _explained(self.config.precision), autocast(self.config.precision, self.world.device):
            output, target = run_model(model, batch)
            value = self.loss_fn(output, target)
        total, count = sum_and_count(value, len(lane.indices), "loss_fn")
        if self.guard is not None and lane.samples:
            self.guard.see(total)
        scale = self.guard.scale if self.guard is not None else 1.0
        with _explained(self.config.precision):
            (total * (scale / lane.step_samples)).backward()  # type: ignore[no-untyped-call]
        return total.detach(), count, isinstance(value, (tuple, list))

    def _ride_alone(self, lane: Lane) -> Gradients:
        """The gradients of one lane, added to nothing. DDP takes no part."""
        self.optimizer.zero_grad(set_to_none=True)
        self._ride(lane, self.replica.module)
        return self._gradients()

    def _gradients(self) -> Gradients:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _take_gradients(self) -> Gradients:
        """The gradients of the lane that has just run, taken out of the parameters; zeros for unused ones."""
        missing = [name for name, p in self.named if p.grad is None]
        if missing and not self.config.find_unused_parameters:
            raise UnusedParameters(missing)
        taken = []
        for place, parameter in enumerate(self.parameters):
            self._is_used[place] |= parameter.grad is not None
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return taken

    def _reduce_after_backward(self) -> None:
        """Where DDP does not reduce: without DDP, or with parameters that only some lanes use. All ranks."""
        total: Gradients | None = None
        for branch in self.lane_sum.remaining(self.lanes_per_rank):
            if total is not None:
                torch._foreach_add_(total, branch)
            total = total or branch
        gradients = [
            total[place] if total is not None and is_used else None for place, is_used in enumerate(self._is_used)
        ]
        mine = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        if self.guard is not None and mine:
            cast(self.guard.vote, mine[0])
        if self.config.find_unused_parameters:
            gradients = reduce_after_backward(
                gradients, self.parameters, self.reduction, bucket_bytes=self.config.bucket_mb * 2**20
            )
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _divide_by_count(self, counts: torch.Tensor, step_samples: int) -> None:
        """Gradients so far are of the sum over samples; make them of the sum over what the loss counted. All ranks."""
        # All lanes in their order, then one sum: it is the same at any number of ranks.
        total = torch.cat(self.world.gather_equal(counts)).sum()
        factor = torch.where(total == 0, 0.0, step_samples / total)  # nothing counted, nothing learnt
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@contextmanager
def _explained(precision: str) -> Iterator[None]:
    """An operator that this device does not have, or cannot repeat, is an error of torch; say what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if precision != "fp32" and NO_KERNEL.search(str(error)):
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


def run_model(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    """The model's output and the target: `(*inputs, target)` of a tuple, `labels` of a dict."""
    if isinstance(batch, Mapping):
        named = {key: value for key, value in batch.items() if key != "labels"}
        return model(**named), batch.get("labels")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(
            f"a batch is a {type(batch).__name__}; the data set must give (*inputs, target), or a dict with labels"
        )
    *inputs, target = batch
    return model(*inputs), target
