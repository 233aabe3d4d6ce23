"""How gradients are added up: over the lanes of a rank and across ranks, always in the order of one binary tree.

Floating-point sums depend on their order. The tree over the lanes of a step is fixed by their number: halves, halves of
halves, and so on. A rank adds its own lanes up that tree as they come; across ranks every level adds what two ranks
hold, and a + b is b + a to the last bit. So any power-of-two number of ranks gives the same sums.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
import torch.distributed as dist

from paceline.engine.precision import HALF
from paceline.world import PATIENCE, World

# DDP compares the annotations of its hook with the classes themselves, so this module does not postpone annotations.

PARTS = 2  # Gloo sums with one core a tensor; cut in two, two cores do it
WORTH_CUTTING = 1 << 18  # bytes
POWER_RANK = 2  # of the matrices that PowerSGD sends
POWER_AFTER = 100  # steps: the first gradients change most, and all that follows rests on them

Gradients = list[torch.Tensor]
Future = torch.futures.Future[torch.Tensor]


def merges_after(lanes: int) -> list[int]:
    """How many sums complete with each lane of the tree: [0, 1, 0, 2] for four (pure)."""
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
        """Begin a step."""
        self._branches: list[Gradients | None] = []
        self._next = 0

    def add(self, lane: int, gradients: Gradients) -> None:
        """Add a lane's gradients, by its place among this rank's lanes; lanes that are passed over were empty."""
        self._skip_to(lane)
        self._push(gradients)

    def remaining(self, lane: int) -> list[Gradients]:
        """The branches to be added to `lane`, which is the last one, in this order."""
        self._skip_to(lane)
        return [branch for branch in reversed(self._branches) if branch is not None]

    def _skip_to(self, lane: int) -> None:
        while self._next < lane:
            self._push(None)

    def _push(self, branch: Gradients | None) -> None:
        self._branches.append(branch)
        for _ in range(self._merges[self._next]):
            right, left = self._branches.pop(), self._branches.pop()
            self._branches.append(_added(left, right))
        self._next += 1


def _added(left: Gradients | None, right: Gradients | None) -> Gradients | None:
    if left is None or right is None:
        return left if right is None else right
    torch._foreach_add_(left, right)
    return left


class Reduction:
    """Sums tensors across ranks. Every rank must reduce the same tensors in the same order."""

    def __init__(self, world: World, exact: bool, compression: str = "none", parts: int = PARTS) -> None:
        """All ranks: process groups are made here. With `powersgd` it is DDP's hook that compresses, not this."""
        self.world, self.compression = world, compression if world.size > 1 else "none"
        # Two ranks make a sum of two terms, which has only one order: torch's own all-reduce does it.
        climbs = exact and world.size > 2 and _is_power_of_two(world.size)
        if climbs:
            self._ladders = [Ladder(world, _pair_groups(world)) for _ in range(parts if world.backend == "gloo" else 1)]
        elif world.backend == "gloo" and world.device.type == "cuda" and world.size > 1:
            # When the future of Gloo's all-reduce is done, the sums are on their way to the GPU, and only its default
            # stream waits for them. The thread of a ladder has the stream of the step wait.
            self._ladders = [Ladder(world, [dist.new_group(timeout=PATIENCE)])]
        else:
            self._ladders = []

    def start(self, tensor: torch.Tensor) -> Future:
        """Begin to sum a tensor in place. All ranks."""
        if self.world.size == 1:
            return _done(tensor)
        if self.compression in HALF and tensor.dtype == torch.float32:
            return self._start(tensor.to(HALF[self.compression])).then(lambda half: tensor.copy_(half.value()))
        return self._start(tensor)

    def _start(self, tensor: torch.Tensor) -> Future:
        if not self._ladders:
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr, no-any-return]
        if len(self._ladders) == 1 or tensor.nbytes < WORTH_CUTTING:
            return self._ladders[0].start(tensor)
        pieces = tensor.view(-1).tensor_split(len(self._ladders))
        started = [ladder.start(piece) for ladder, piece in zip(self._ladders, pieces, strict=True)]

        def whole(futures: torch.futures.Future[list[Future]]) -> torch.Tensor:
            for future in futures.wait():
                future.wait()  # done; raises what it ended with
            return tensor

        return torch.futures.collect_all(started).then(whole)


class Ladder:
    """The levels of the tree across ranks: at each, this rank and a partner all-reduce between them.

    A tree of one level, with all ranks in it, is an all-reduce whose end can be waited for on a stream.
    """

    def __init__(self, world: World, groups: list[dist.ProcessGroup]) -> None:
        """`groups` are those of this rank, one for each level."""
        self._device, self._groups = world.device, groups
        self._thread: ThreadPoolExecutor | None = None
        if world.backend == "gloo":
            self._thread = ThreadPoolExecutor(1, "paceline-reduce", initializer=_use_device, initargs=(world.device,))
        self._stream: torch.cuda.Stream | None = None
        if world.backend == "nccl":
            self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]

    def start(self, tensor: torch.Tensor) -> Future:
        """Begin to sum a tensor in place. All ranks."""
        if self._stream is not None:
            return self._in_stream(tensor, self._stream)
        # Gloo may finish two operations of a group in either order. One thread that takes one tensor after the other
        # keeps the order of the next level the same on all ranks; backward goes on beside it.
        assert self._thread is not None
        future: Future = torch.futures.Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def climb() -> None:
            try:
                # Where the tensor was made and will be read: a thread has a stream of its own.
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._climb(tensor)
                    future.set_result(tensor)
            except Exception as error:  # noqa: BLE001 - raised again where backward waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(climb)
        return future

    def _in_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> Future:
        # NCCL's operations wait for each other on a stream of their own, so backward's stream never waits.
        future: Future = torch.futures.Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._climb(tensor)
            tensor.record_stream(stream)
            future.set_result(tensor)
        return future

    def _climb(self, tensor: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(tensor, group=group)


class BucketHook:
    """What DDP does with a bucket of the last lane's gradients: adds this rank's other lanes, then the other ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        vote: torch.Tensor | None = None,
        on_last: Callable[[], None] = lambda: None,
    ) -> None:
        """`vote`, a single number, is added to the sums of every step, as it is when the first bucket is ready.

        `on_last` is called when this rank has handed over everything, and begins to wait.
        """
        self._place: dict[torch.Tensor, int] = {parameter: place for place, parameter in enumerate(parameters)}
        self._reduction, self._vote, self._on_last = reduction, vote, on_last
        self._power = PowerSum(reduction.world) if reduction.compression == "powersgd" else None
        self.begin([], is_empty=False)

    def begin(self, branches: list[Gradients], *, is_empty: bool) -> None:
        """Before the last lane's backward: what its gradients are added to, and whether it has no samples."""
        self._branches, self._is_empty = branches, is_empty
        if self._power is not None:
            self._power.begin()
        self.reduced = 0  # gradient elements that have gone through since then

    def take(self, bucket: dist.GradBucket) -> Future:
        """Sum one bucket. All ranks, in the same order."""
        buffer = bucket.buffer()
        is_first = not self.reduced
        self.reduced += buffer.numel()
        if self._is_empty:
            buffer.fill_(-0.0)  # the only number that changes nothing when it is added, not even the sign of a zero
        elif self._branches:
            parameters = bucket.parameters()
            gradients = _views(buffer, parameters)
            places = [self._place[parameter] for parameter in parameters]
            for branch in self._branches:
                torch._foreach_add_(gradients, [branch[place] for place in places])
        if self._vote is not None and is_first:
            cast(self._vote, buffer)
        started = self._reduction.start(buffer) if self._power is None else self._power.start(bucket)
        if bucket.is_last():
            self._on_last()
        return started


class PowerSum:
    """Sums buckets across ranks as matrices of low rank; what a rank could not send, it adds to its next gradients."""

    def __init__(self, world: World) -> None:
        # Only here: it takes a part of a second to load, and few need it.
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._world, self._hook = world, powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=POWER_AFTER
        )

    def begin(self) -> None:
        """Before a step: what is remembered of a step that was not finite is forgotten, by all ranks alike."""
        memory = self._state.error_dict
        if memory and not torch.stack([left.isfinite().all() for left in memory.values()]).all():
            for kept in (memory, self._state.p_memory_dict, self._state.q_memory_dict):
                kept.clear()

    def start(self, bucket: dist.GradBucket) -> Future:
        """Begin to sum a bucket. All ranks."""
        started: Future = self._hook(self._state, bucket)
        if self._world.backend == "gloo":
            started.wait()  # the parts of two buckets could meet in another order on another rank
        return started.then(lambda mean: mean.value().mul_(self._world.size))


def _views(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Gradients:
    """The gradients in a bucket as they lie there, which is as their parameters lie.

    Those of `bucket.gradients()` take all of them to lie row by row: filters that lie by channels would be shuffled.
    """
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    return [
        buffer.as_strided(p.shape, p.stride(), buffer.storage_offset() + end - p.numel())
        for p, end in zip(parameters, ends, strict=True)
    ]


def cast(vote: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a vote to one element of a gradient."""
    values = gradient._values() if gradient.is_sparse else gradient
    values[(slice(1),) * values.ndim].add_(vote)


def reduce_bucket(hook: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that DDP calls as each bucket becomes ready, while backward goes on."""
    return hook.take(bucket)


def reduce_after_backward(
    gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], reduction: Reduction, bucket_bytes: float
) -> list[torch.Tensor | None]:
    """The sums of gradients that only some ranks may have: None where nobody has one. All ranks."""
    world = reduction.world
    has = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32, device=world.device)
    if world.size > 1:
        dist.all_reduce(has, op=dist.ReduceOp.MAX)
    wanted = [place for place, anywhere in enumerate(has.tolist()) if anywhere]
    summed: list[torch.Tensor | None] = [None] * len(gradients)
    formats = dict.fromkeys(like[place].dtype for place in wanted)
    by_format = [[place for place in wanted if like[place].dtype == dtype] for dtype in formats]
    grouped = (_buckets(places, lambda place: like[place].nbytes, bucket_bytes) for places in by_format)
    for places in itertools.chain.from_iterable(grouped):
        parts = [gradients[place] for place in places]
        filled = [torch.zeros_like(like[p]) if part is None else part for p, part in zip(places, parts, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in filled])
        # Zeros that stand for nothing may have turned a -0.0 into 0.0 at some world sizes; + 0.0 does so at all.
        flat = reduction.start(flat).wait() + 0.0
        for place, part in zip(places, torch.split(flat, [like[place].numel() for place in places]), strict=True):
            summed[place] = _like(part.view_as(like[place]), like[place])
    return summed


def _like(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The values in the layout of another tensor: fused optimizers take gradients as they lie in memory."""
    return values if values.stride() == other.stride() else torch.empty_like(other).copy_(values)


def _buckets(places: list[int], size: Callable[[int], int], limit: float) -> list[list[int]]:
    ends = itertools.accumulate(map(size, places))
    grouped = itertools.groupby(zip(places, ends, strict=True), key=lambda item: int(item[1] // limit))
    return [[place for place, _ in group] for _, group in grouped]


def _use_device(device: torch.device) -> None:
    """A new thread begins on the first GPU, whichever this rank has."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _pair_groups(world: World) -> list[dist.ProcessGroup]:
    """For each level of the tree, the group of this rank and its partner. All ranks."""
    mine = []
    for level in range(world.size.bit_length() - 1):
        pairs = [(rank, rank | 1 << level) for rank in range(world.size) if not rank & 1 << level]
        # Every rank makes every group, as torch demands.
        groups = {pair: dist.new_group(list(pair), timeout=PATIENCE) for pair in pairs}
        mine += [group for pair, group in groups.items() if world.rank in pair]
    return mine


def _done(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future
