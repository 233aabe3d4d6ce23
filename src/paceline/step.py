"""One optimizer step over this rank's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import Config
from paceline.data.loader import Lane, to_device
from paceline.ema import Ema
from paceline.errors import ConfigError, DataError, UnusedParameters
from paceline.metrics import sum_and_count
from paceline.precision import autocast
from paceline.randomness import seed_generators
from paceline.reduce import BucketHook, Gradients, LaneSum, Reduction, reduce_after_backward, reduce_bucket
from paceline.replica import Replica, Single
from paceline.world import World


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
    ) -> None:
        self.replica, self.optimizer, self.config, self.world = replica, optimizer, config, world
        self.loss_fn, self.lr_factor = config.function("loss_fn"), lr_factor
        optimizer.zero_grad()  # the first call makes torch load its compiler, which is not part of the first step
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.ema = Ema(replica.module, config.ema) if config.ema is not None else None
        self.lane_sum, self.lanes_per_rank = LaneSum(lanes_per_rank), lanes_per_rank
        self.reduction = Reduction(world, config.exact)
        # DDP reduces while backward goes on, but it must know what is unused before the other lanes have run.
        self.hook = None
        if isinstance(replica, Replica) and not config.find_unused_parameters:
            self.hook = BucketHook(self.parameters, self.reduction)
            replica.register_comm_hook(self.hook, reduce_bucket)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, as of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def take(self, step: int, lanes: Sequence[Lane]) -> torch.Tensor:
        """One update. Returns the loss's sum and count for each lane of this rank, on the device. All ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        totals, counts_itself = self._backward(lanes)
        if counts_itself:
            self._divide_by_count(totals[:, 1], lanes[0].step_samples)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.lr_factor(step)
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
        statistics: list[torch.Tensor] = []
        counts_itself = False
        for lane in lanes:
            place = lane.lane % self.lanes_per_rank
            is_reducing = self.hook is not None and lane is lanes[-1]
            if self.hook is not None and is_reducing:
                self.hook.begin(self.lane_sum.remaining(place), is_empty=not lane.samples)
            with _explained(), nullcontext() if is_reducing else self.replica.no_sync():
                total, count, counts_itself = self._ride(lane)
            if lane.samples:
                totals[place, 0], totals[place, 1] = total, count
                if not is_reducing:
                    self.lane_sum.add(place, self._take_gradients())
            if lane is lanes[0] and len(lanes) > 1:
                statistics = [buffer.clone() for buffer in self.replica.module.buffers()]
        # BatchNorm's statistics follow the first lane of a rank; rank 0's, which is lane 0, are the ones that count.
        for buffer, kept in zip(self.replica.module.buffers(), statistics, strict=bool(statistics)):
            buffer.copy_(kept)
        if self.hook is None:
            self._reduce_after_backward()
        elif self.hook.reduced != sum(p.numel() for p in self.parameters):
            raise UnusedParameters([name for name, p in self.named if p.grad is None])
        return totals, counts_itself

    def _ride(self, lane: Lane) -> tuple[torch.Tensor, Any, bool]:
        """Forward and backward of one lane: the loss's sum, its count, and whether the loss counted by itself."""
        batch = to_device(lane.data, self.world.device)
        seed_generators(self.config.seed, "forward", lane.step, lane.lane)
        with autocast(self.config.precision, self.world.device):
            output, target = run_model(self.replica, batch)
            value = self.loss_fn(output, target)
        total, count = sum_and_count(value, len(lane.indices), "loss_fn")
        (total * (1 / lane.step_samples)).backward()  # type: ignore[no-untyped-call]
        return total.detach(), count, isinstance(value, (tuple, list))

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
def _explained() -> Iterator[None]:
    """An operator that cannot be repeated to the last bit is an error of torch; say what to do about it."""
    try:
        yield
    except RuntimeError as error:
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
