"""Sums of gradients over the lanes of a rank and across ranks, always in the order of one binary tree.

Floating-point sums depend on their order. The tree over the lanes of a step is fixed by their number: halves, halves of
halves, and so on. A rank sums its own lanes along that tree as they finish. Across ranks, every level adds the sums of
two ranks, and a + b is b + a to the last bit. So any power-of-two number of ranks gives the same sums.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
import torch.distributed as dist

from paceline.engine.precision import HALF_DTYPES
from paceline.world import COLLECTIVE_TIMEOUT, World

# DDP compares the annotations of its hook with the classes themselves, so this module does not postpone annotations.

GLOO_PARTS = 2  # Gloo sums a tensor with one core; two halves are summed by two cores
MIN_SPLIT_BYTES = 1 << 18  # smaller tensors are not split
POWERSGD_RANK = 2  # of the matrices that PowerSGD sends
POWERSGD_START_STEP = 100  # not compressed before: the first gradients change most, and later weights depend on them

Gradients = list[torch.Tensor]
Future = torch.futures.Future[torch.Tensor]


def merges_after(lanes: int) -> list[int]:
    """The number of sums that each lane of the tree completes: [0, 1, 0, 2] for four lanes (pure)."""
    if lanes == 1:
        return [0]
    left = lanes // 2 if lanes % 2 == 0 else lanes - 1
    right = merges_after(lanes - left)
    right[-1] += 1
    return merges_after(left) + right


class LaneSum:
    """The sum over the lanes of this rank, kept as the unfinished branches of the tree: about log2(lanes) copies."""

    def __init__(self, lanes: int) -> None:
        self._merges = merges_after(lanes)
        self.restart()

    def restart(self) -> None:
        """Start a step."""
        self._branches: list[Gradients | None] = []
        self._next = 0

    def add(self, lane: int, gradients: Gradients) -> None:
        """Add a lane's gradients, by its index among this rank's lanes; lanes that are left out were empty."""
        while self._next < lane:
            self._push(None)
        self._push(gradients)

    def remaining(self, lane: int) -> list[Gradients]:
        """The branches to be added to `lane`, which is the last lane, in this order."""
        while self._next < lane:
            self._push(None)
        return [branch for branch in reversed(self._branches) if branch is not None]

    def _push(self, branch: Gradients | None) -> None:
        self._branches.append(branch)
        for _ in range(self._merges[self._next]):
            right, left = self._branches.pop(), self._branches.pop()
            self._branches.append(_merge(left, right))
        self._next += 1


def _merge(left: Gradients | None, right: Gradients | None) -> Gradients | None:
    if left is None or right is None:
        return left if right is None else right
    torch._foreach_add_(left, right)
    return left


class Reduction:
    """Sums tensors across ranks. Every rank must reduce the same tensors in the same order."""

    def __init__(self, world: World, exact: bool, compression: str = "none", parts: int = GLOO_PARTS) -> None:
        """All ranks: process groups are created here. With `powersgd`, `BucketHook` compresses, not this class."""
        self.world, self.compression = world, compression if world.size > 1 else "none"
        self._trees: list[TreeReducer] = []
        # The sum of two ranks has only one order, so torch's own all-reduce gives the same bits.
        if exact and world.size > 2 and _is_power_of_two(world.size):
            parts = parts if world.backend == "gloo" else 1
            self._trees = [TreeReducer(world, _pair_groups(world)) for _ in range(parts)]
        elif world.backend == "gloo" and world.device.type == "cuda" and world.size > 1:
            # When the future of Gloo's all-reduce is done, the sums are still being copied to the GPU, and only its
            # default stream waits for them. The thread of a tree has the stream of the step wait.
            self._trees = [TreeReducer(world, [dist.new_group(timeout=COLLECTIVE_TIMEOUT)])]

    def start(self, tensor: torch.Tensor) -> Future:
        """Start to sum a tensor in place. All ranks."""
        if self.world.size == 1:
            return _completed_future(tensor)
        if self.compression in HALF_DTYPES and tensor.dtype == torch.float32:
            return self._start(tensor.to(HALF_DTYPES[self.compression])).then(lambda half: tensor.copy_(half.value()))
        return self._start(tensor)

    def _start(self, tensor: torch.Tensor) -> Future:
        if not self._trees:
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr, no-any-return]
        if len(self._trees) == 1 or tensor.nbytes < MIN_SPLIT_BYTES:
            return self._trees[0].start(tensor)
        pieces = tensor.view(-1).tensor_split(len(self._trees))
        started = [tree.start(piece) for tree, piece in zip(self._trees, pieces, strict=True)]

        def whole(futures: torch.futures.Future[list[Future]]) -> torch.Tensor:
            for future in futures.wait():
                future.wait()  # is done; raises its error, if any
            return tensor

        return torch.futures.collect_all(started).then(whole)


class TreeReducer:
    """Sums along the tree across ranks: at each level, this rank and a partner all-reduce between them.

    With one group of all ranks it is an ordinary all-reduce, for whose end a CUDA stream can wait.
    """

    def __init__(self, world: World, groups: list[dist.ProcessGroup]) -> None:
        """`groups` are the process groups of this rank, one for each level."""
        self._device, self._groups = world.device, groups
        self._thread: ThreadPoolExecutor | None = None
        if world.backend == "gloo":
            self._thread = ThreadPoolExecutor(1, "paceline-reduce", initializer=_use_device, initargs=(world.device,))
        self._stream: torch.cuda.Stream | None = None
        if world.backend == "nccl":
            self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]

    def start(self, tensor: torch.Tensor) -> Future:
        """Start to sum a tensor in place. All ranks."""
        if self._stream is not None:
            return self._start_on_stream(tensor, self._stream)
        # Gloo may finish two operations of a group in either order. One thread that reduces one tensor after the other
        # keeps the order of the next level the same on all ranks, while backward continues.
        assert self._thread is not None
        future: Future = torch.futures.Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def reduce() -> None:
            try:
                # The stream where the tensor was written and will be read: a thread has a stream of its own.
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._reduce(tensor)
                    future.set_result(tensor)
            except Exception as error:  # noqa: BLE001 - raised again where backward waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(reduce)
        return future

    def _start_on_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> Future:
        # NCCL's operations wait for each other on a stream of their own, so backward's stream never waits.
        future: Future = torch.futures.Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._reduce(tensor)
            tensor.record_stream(stream)
            future.set_result(tensor)
        return future

    def _reduce(self, tensor: torch.Tensor) -> None:
        """All ranks."""
        for group in self._groups:
            dist.all_reduce(tensor, group=group)


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

    def begin(self, branches: list[Gradients], *, is_empty: bool) -> None:
        """Prepare for the last lane's backward: the branches to add, and whether the lane has no samples."""
        self._branches, self._is_empty = branches, is_empty
        if self._power_sgd is not None:
            self._power_sgd.begin()
        self.reduced = 0  # gradient elements whose reduction has started since then

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """Start to sum one bucket: the hook that DDP calls while backward continues. All ranks, in the same order."""
        buffer = bucket.buffer()
        is_first = not self.reduced
        self.reduced += buffer.numel()
        if self._is_empty:
            buffer.fill_(-0.0)  # the only number that changes nothing when it is added, not even the sign of a zero
        elif self._branches:
            parameters = bucket.parameters()
            gradients = _views(buffer, parameters)
            indices = [self._index[parameter] for parameter in parameters]
            for branch in self._branches:
                torch._foreach_add_(gradients, [branch[index] for index in indices])
        if self._nan_flag is not None and is_first:
            add_flag(self._nan_flag, buffer)
        started = self._reduction.start(buffer) if self._power_sgd is None else self._power_sgd.start(bucket)
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
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    return [
        buffer.as_strided(p.shape, p.stride(), buffer.storage_offset() + end - p.numel())
        for p, end in zip(parameters, ends, strict=True)
    ]


def add_flag(nan_flag: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the flag to one element of a gradient."""
    values = gradient._values() if gradient.is_sparse else gradient
    values[(slice(1),) * values.ndim].add_(nan_flag)


def reduce_after_backward(
    gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], reduction: Reduction, bucket_bytes: float
) -> list[torch.Tensor | None]:
    """The sums of gradients that only some ranks may have: None where no rank has one. All ranks."""
    world = reduction.world
    has = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32, device=world.device)
    if world.size > 1:
        dist.all_reduce(has, op=dist.ReduceOp.MAX)
    wanted = [index for index, anywhere in enumerate(has.tolist()) if anywhere]
    summed: list[torch.Tensor | None] = [None] * len(gradients)
    formats = dict.fromkeys(like[index].dtype for index in wanted)
    by_format = [[index for index in wanted if like[index].dtype == dtype] for dtype in formats]
    grouped = (_buckets(indices, lambda index: like[index].nbytes, bucket_bytes) for indices in by_format)
    for indices in itertools.chain.from_iterable(grouped):
        parts = [gradients[index] for index in indices]
        filled = [torch.zeros_like(like[p]) if part is None else part for p, part in zip(indices, parts, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in filled])
        # Zeros in place of missing gradients may turn a -0.0 into 0.0 at some world sizes; + 0.0 does so at all.
        flat = reduction.start(flat).wait() + 0.0
        for index, part in zip(indices, torch.split(flat, [like[index].numel() for index in indices]), strict=True):
            summed[index] = _in_layout_of(part.view_as(like[index]), like[index])
    return summed


def _in_layout_of(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The values with the strides of another tensor: fused optimizers read gradients in the order of memory."""
    return values if values.stride() == other.stride() else torch.empty_like(other).copy_(values)


def _buckets(indices: list[int], size: Callable[[int], int], limit: float) -> list[list[int]]:
    ends = itertools.accumulate(map(size, indices))
    grouped = itertools.groupby(zip(indices, ends, strict=True), key=lambda item: int(item[1] // limit))
    return [[index for index, _ in group] for _, group in grouped]


def _use_device(device: torch.device) -> None:
    """Select the GPU of this rank in a new thread, which starts with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _pair_groups(world: World) -> list[dist.ProcessGroup]:
    """For each level of the tree, the group of this rank and its partner. All ranks."""
    mine = []
    for level in range(world.size.bit_length() - 1):
        pairs = [(rank, rank | 1 << level) for rank in range(world.size) if not rank & 1 << level]
        # Every rank creates every group, as torch requires.
        groups = {pair: dist.new_group(list(pair), timeout=COLLECTIVE_TIMEOUT) for pair in pairs}
        mine += [group for pair, group in groups.items() if world.rank in pair]
    return mine


def _completed_future(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future
