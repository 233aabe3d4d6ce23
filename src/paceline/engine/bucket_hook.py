"""Sums of DDP's buckets while backward runs: the hook that DDP calls, and its form with PowerSGD."""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.engine.flat import slots_in, starts_of
from paceline.engine.integer_sum import Gradients
from paceline.engine.reduce import Future, Reduction, add_flag, add_lanes
from paceline.world import World

# DDP compares the annotations of its hook with the classes themselves, so this module does not postpone annotations.

POWERSGD_RANK = 2  # of the matrices that PowerSGD sends
POWERSGD_START_STEP = 100  # not compressed before: the first gradients change most, and later weights depend on them


class BucketHook:
    """Sums DDP's buckets of the last lane's gradients: adds this rank's other lanes, then the other ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        nan_flag: torch.Tensor | None = None,
        on_last: Callable[[], None] = lambda: None,
    ) -> None:
        """`nan_flag`, a single number, is added to the first bucket of every step when that is ready.

        `on_last` is called when this rank has started all reductions and only waits for them.
        """
        self._index: dict[torch.Tensor, int] = {parameter: index for index, parameter in enumerate(parameters)}
        self._reduction, self._nan_flag, self._on_last = reduction, nan_flag, on_last
        self._power_sgd = PowerSGDSum(reduction.world) if reduction.compression == "powersgd" else None
        self.begin([], is_empty=False)

    def begin(self, lanes: Sequence[Gradients], *, is_empty: bool) -> None:
        """Prepare for the last lane's backward: this rank's other lanes, and whether the last one has no samples."""
        self._lanes, self._is_empty = lanes, is_empty
        if self._power_sgd is not None:
            self._power_sgd.begin()
        self.reduced = 0  # gradient elements whose reduction has started since then

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """Start to sum one bucket: the hook that DDP calls while backward continues. All ranks, in the same order."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        is_first = not self.reduced
        self.reduced += buffer.numel()
        gradients = _views(buffer, parameters)
        indices = [self._index[parameter] for parameter in parameters]
        lanes = [[lane[index] for index in indices] for lane in self._lanes]
        if self._nan_flag is not None and is_first:
            # Without any lane, no loss has been checked.
            add_flag(self._nan_flag, itertools.chain(*lanes) if self._is_empty else gradients)
        if self._power_sgd is not None:
            add_lanes(gradients, lanes, buffer, is_empty=self._is_empty)
            started = self._power_sgd.start(bucket)
        else:
            started = self._reduction.start(gradients, lanes, buffer, is_empty=self._is_empty, parameters=parameters)
        if bucket.is_last():
            self._on_last()
        return started


class PowerSGDSum:
    """Sums buckets across ranks as matrices of low rank; each rank adds the rounding error to its next gradients."""

    def __init__(self, world: World) -> None:
        # Imported only here: it takes a part of a second to load, and few runs need it.
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._world, self._hook = world, powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START_STEP
        )

    def begin(self) -> None:
        """Before a step: clear the errors of a step that was not finite; all ranks decide the same."""
        errors = self._state.error_dict
        if errors and not torch.stack([error.isfinite().all() for error in errors.values()]).all():
            for memory in (errors, self._state.p_memory_dict, self._state.q_memory_dict):
                memory.clear()

    def start(self, bucket: dist.GradBucket) -> Future:
        """Start to sum a bucket. All ranks."""
        started: Future = self._hook(self._state, bucket)
        if self._world.backend == "gloo":
            started.wait()  # or the operations of two buckets could be in another order on another rank
        return started.then(lambda mean: mean.value().mul_(self._world.size))


def _views(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Gradients:
    """The gradients in a bucket, with the strides of their parameters.

    `bucket.gradients()` takes all of them for contiguous and would shuffle channels-last filters.
    """
    return slots_in(buffer, parameters, starts_of(parameters, 1))
