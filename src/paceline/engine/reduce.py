"""Sums of gradients over the lanes of a rank and over ranks, with the same bits at any number of ranks.

Two numbers have the same sum in either order, so steps of one or two lanes are summed by torch's all-reduce. The
gradients of more lanes are rounded to integers first (`integer_sum.py`). Ranks of one host sum on the CPU through its
memory, which takes a fraction of the time of Gloo's messages. Where each sum is needed on one rank only, `scatter.py`
takes the place of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.config import Settings
from paceline.engine.clock import REDUCTION, PhaseClock
from paceline.engine.flat import slots_in, starts_of
from paceline.engine.integer_sum import Gradients, IntegerSum, Scratch
from paceline.engine.precision import HALF_DTYPES
from paceline.engine.scatter import OwnerOrder, ReduceScatter
from paceline.world import COLLECTIVE_TIMEOUT, World

GLOO_QUEUES = 2  # while one bucket is sent, the next one is rounded
GLOO_PARTS = 2  # Gloo sums a tensor with one core; two halves are summed by two cores
MIN_SPLIT_BYTES = 1 << 18  # smaller tensors are not split
ALIGNED_ELEMENTS = 64  # kernels that sum may take another order at unaligned addresses

Future = torch.futures.Future[torch.Tensor]
OwnerOf = Callable[[torch.Tensor], int]  # the rank that needs the sum of a parameter's gradients
Work = Callable[["RankQueue | None"], None]


class LaneGradients:
    """The gradients of the lanes that a rank has finished in a step: of each lane, or only their sum."""

    def __init__(self, *, keeps_each: bool) -> None:
        self._keeps_each = keeps_each
        self.restart()

    def restart(self) -> None:
        """Start a step."""
        self.lanes: list[Gradients] = []

    def add(self, gradients: Gradients) -> None:
        """Add those of a lane, which may be changed from then on."""
        if self.lanes and not self._keeps_each:
            torch._foreach_add_(self.lanes[0], gradients)
        else:
            self.lanes.append(gradients)


class Reduction:
    """Sums gradients over lanes and ranks. Every rank must sum those of the same parameters in the same order."""

    def __init__(
        self, world: World, lanes: int, *, exact: bool, compression: str = "none", bucket_bytes: float = 25 * 2**20,
        clock: PhaseClock | None = None, owner_of: OwnerOf | None = None,
    ) -> None:  # fmt: skip
        """`lanes` are those of a step. All ranks. With `powersgd`, the hook of DDP compresses, not this class.

        With `owner_of`, only the owner of a parameter gets the sum of its gradients.
        """
        self.world, self.lanes, self.compression = world, lanes, compression if world.size > 1 else "none"
        self.bucket_bytes, self.owner_of = bucket_bytes, owner_of if world.size > 1 else None
        self.uses_integers = exact and lanes > 2
        self._scratch, self._clock = Scratch(), clock or PhaseClock()
        self._shared = world.shared_sum() if self.owner_of is None else None
        self._queues: list[RankQueue] = []
        self._started = 0
        # When the future of Gloo's all-reduce is done, sums are still being copied to a GPU, and only its default
        # stream waits for them. The thread of the queue has the stream of the step wait.
        needs_queue = self.uses_integers or self.owner_of is not None
        needs_queue |= world.backend == "gloo" and world.device.type == "cuda"
        if world.size > 1 and needs_queue and self._shared is None:
            self._queues = [RankQueue(world) for _ in range(GLOO_QUEUES if world.device.type == "cpu" else 1)]

    def start(
        self, sums: Gradients, lanes: Sequence[Gradients], buffer: torch.Tensor, *, is_empty: bool,
        parameters: Sequence[torch.Tensor] = (),
    ) -> Future:  # fmt: skip
        """Start to sum gradients over the given lanes of this rank and over ranks.

        `sums`, which fill `buffer`, hold the gradients of one more lane unless `is_empty`; the sums replace them. They
        have the strides of the parameters, which are given if they have owners. All ranks.
        """
        owners = None if self.owner_of is None else [self.owner_of(parameter) for parameter in parameters]
        if self.uses_integers:
            lanes = [*lanes] if is_empty else [*lanes, sums]
            return self._run(partial(self.sum_integers, sums, lanes, sums, owners), buffer)
        add_lanes(sums, lanes, buffer, is_empty=is_empty)
        if owners is not None:
            return self._run(partial(self._scatter_floats, sums, owners), buffer)
        if self.compression in HALF_DTYPES and buffer.dtype == torch.float32:
            half = buffer.to(HALF_DTYPES[self.compression])
            return self._start_sum(half).then(lambda summed: buffer.copy_(summed.value()))
        return self._start_sum(buffer)

    def _start_sum(self, tensor: torch.Tensor) -> Future:
        """Start to sum a tensor over ranks in place, by torch's all-reduce. All ranks."""
        if self.world.size == 1 or self._shared is not None or self._queues:
            return self._run(lambda queue: self._all_reduce(tensor, queue), tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr, no-any-return]

    def _run(self, work: Work, result: torch.Tensor) -> Future:
        """Start work whose result will be in a tensor. All ranks."""
        if self._queues:
            self._started += 1
            return self._queues[self._started % len(self._queues)].start(work, result)
        with torch.no_grad():
            work(None)
        future: Future = torch.futures.Future()
        future.set_result(result)
        return future

    def sum_integers(
        self, sums: Gradients, lanes: Sequence[Gradients], like: Sequence[torch.Tensor],
        owners: Sequence[int] | None = None, queue: RankQueue | None = None,
    ) -> None:  # fmt: skip
        """Replace `sums` by the sums of lanes; `like` has the strides of the parameters. All ranks.

        With `owners`, a rank gets the sums that it owns.
        """
        # In parts, for less memory: in the first step of DDP, one bucket has all gradients.
        for part in buckets_of(range(len(like)), like, self.bucket_bytes):
            order = None if owners is None else OwnerOrder(part, owners, self.world)
            part = part if order is None else order.indices
            of_lanes = [[lane[index] for index in part] for lane in lanes]
            scratch = self._scratch if queue is None else queue.scratch
            total = IntegerSum([like[index] for index in part], self.lanes, scratch)
            exponents = total.exponents(of_lanes)
            self._all_reduce(exponents, queue, dist.ReduceOp.MAX)
            integers = total.integers(of_lanes, exponents)
            if order is not None and queue is not None:
                ReduceScatter(self.world, queue.group, queue.scratch).integers(total, integers, sums, order)
            else:
                self._all_reduce(integers, queue)
                total.write([sums[index] for index in part])

    def _scatter_floats(self, sums: Gradients, owners: Sequence[int], queue: RankQueue | None) -> None:
        """Replace those of `sums` that this rank owns by the sums over ranks. All ranks."""
        assert queue is not None
        scatter = ReduceScatter(self.world, queue.group, queue.scratch)
        for part in buckets_of(range(len(sums)), sums, self.bucket_bytes):
            dtype = sums[part[0]].dtype
            sent = HALF_DTYPES.get(self.compression, dtype) if dtype == torch.float32 else dtype
            scatter.floats(sums, OwnerOrder(part, owners, self.world), sent)

    def _all_reduce(self, tensor: torch.Tensor, queue: RankQueue | None, op: Any = dist.ReduceOp.SUM) -> None:
        """All ranks."""
        if self._shared is not None:
            with self._clock.within(REDUCTION):
                self._shared.all_reduce(tensor, torch.add if op == dist.ReduceOp.SUM else torch.maximum)
        if queue is None:
            return
        is_split = self.world.backend == "gloo" and tensor.nbytes >= MIN_SPLIT_BYTES
        parts = tensor.view(-1).tensor_split(GLOO_PARTS) if is_split else [tensor]
        for work in [dist.all_reduce(part, op, group=queue.group, async_op=True) for part in parts]:
            work.wait()  # type: ignore[union-attr]


def reduction_of(
    world: World, settings: Settings, *, exact: bool, clock: PhaseClock | None = None, owner_of: OwnerOf | None = None
) -> Reduction:
    """The reduction of a run with these settings, whose waiting time is counted by `clock`. All ranks."""
    return Reduction(
        world, settings.lanes, exact=exact, compression=settings.compression, bucket_bytes=settings.bucket_mb * 2**20,
        clock=clock, owner_of=owner_of,
    )  # fmt: skip


def add_lanes(sums: Gradients, lanes: Sequence[Gradients], buffer: torch.Tensor, *, is_empty: bool) -> None:
    """Add lanes to the gradients that fill a buffer, or replace them by their sum if `is_empty`."""
    if is_empty:
        buffer.fill_(-0.0)  # the only number that changes nothing when it is added, not even the sign of a zero
    for lane in lanes:
        torch._foreach_add_(sums, lane)


class RankQueue:
    """Does work with collectives, one after the other in the same order on all ranks, while backward continues."""

    def __init__(self, world: World) -> None:
        """All ranks."""
        self._device, self.scratch = world.device, Scratch()
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self.group: dist.ProcessGroup | None = None
        if world.backend == "gloo":  # whose collectives in a thread must not mix with those of the main thread
            self.group = dist.new_group(timeout=COLLECTIVE_TIMEOUT)
            self._thread = ThreadPoolExecutor(1, "paceline-reduce", initializer=_use_device, initargs=(world.device,))
            # A second team of OpenMP threads would slow down that of the main thread.
            threads = torch.get_num_threads()
            self._thread.submit(torch.set_num_threads, 1).result()
            torch.set_num_threads(threads)
        else:
            self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]

    def start(self, work: Work, result: torch.Tensor) -> Future:
        """Start work, for whose end the stream of the device can wait too. All ranks."""
        if self._stream is not None:
            return self._start_on_stream(work, result, self._stream)
        assert self._thread is not None
        future: Future = torch.futures.Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run() -> None:
            try:
                # The stream where the tensor was written and will be read: a thread has a stream of its own.
                with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                    work(self)
                    future.set_result(result)
            except Exception as error:  # noqa: BLE001 - raised again where backward waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(run)
        return future

    def _start_on_stream(self, work: Work, result: torch.Tensor, stream: torch.cuda.Stream) -> Future:
        # NCCL's operations wait for each other on a stream of their own, so backward's stream never waits.
        future: Future = torch.futures.Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            work(self)
            result.record_stream(stream)
            future.set_result(result)
        return future


def add_flag(nan_flag: torch.Tensor, gradients: Iterable[torch.Tensor]) -> None:
    """Add the flag to one element of the gradients."""
    gradient = next((gradient for gradient in gradients if gradient.numel()), None)
    if gradient is not None:
        gradient[(slice(1),) * gradient.ndim].add_(nan_flag)


def sum_after_backward(
    lanes: Sequence[Gradients], is_used: Sequence[bool], like: Sequence[torch.Tensor], reduction: Reduction
) -> list[torch.Tensor | None]:
    """The sums of gradients that only some ranks may use: None where no rank does. All ranks.

    Where the parameter has another owner, any numbers take the place of a sum.
    """
    world = reduction.world
    used = torch.tensor(is_used, dtype=torch.int32, device=world.device)
    if world.size > 1:
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
    wanted = [index for index, anywhere in enumerate(used.tolist()) if anywhere]
    summed: list[torch.Tensor | None] = [None] * len(like)
    for indices in buckets_of(wanted, like, reduction.bucket_bytes):
        parameters = [like[index] for index in indices]
        starts = starts_of(parameters, ALIGNED_ELEMENTS)
        buffer = torch.zeros(starts[-1], dtype=parameters[0].dtype, device=world.device)
        sums = slots_in(buffer, parameters, starts)
        of_lanes = [[lane[index] for index in indices] for lane in lanes]
        reduction.start(sums, of_lanes, buffer, is_empty=True, parameters=parameters).wait()
        # Zeros in place of missing gradients may turn a -0.0 into 0.0 at some world sizes; + 0.0 does so at all.
        buffer.add_(0.0)
        for index, slot in zip(indices, sums, strict=True):
            summed[index] = slot
    return summed


def sum_on_one_rank(
    parameters: Sequence[torch.nn.Parameter],
    lanes: Sequence[Gradients],
    reduction: Reduction,
    *,
    is_empty: bool = False,
) -> None:
    """Replace the gradients of the last lane, or -0.0 if it `is_empty`, by their sums with the other lanes."""
    used = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in used if parameter.grad is not None]
    # Sparse and complex gradients are refused on several ranks, so their sums need no fixed bits.
    rounded = [i for i, each in enumerate(gradients) if reduction.uses_integers and _has_integers(each)]
    added = sorted({*range(len(gradients))} - {*rounded})
    for lane in lanes if added else ():
        torch._foreach_add_([gradients[index] for index in added], [lane[index] for index in added])
    lanes = [*lanes] if is_empty else [*lanes, gradients]
    sums, like = [gradients[index] for index in rounded], [used[index] for index in rounded]
    reduction.sum_integers(sums, [[lane[index] for index in rounded] for lane in lanes], like)


def _has_integers(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and not gradient.is_complex() and gradient.numel() > 0


def buckets_of(indices: Sequence[int], tensors: Sequence[torch.Tensor], limit: float) -> Iterator[list[int]]:
    """Indices of tensors in groups of one dtype each, closed like DDP's buckets: by the tensor that reaches the limit.

    So a bucket of DDP is one group, whose sum waits for the latency of the network once.
    """
    for dtype in dict.fromkeys(tensors[index].dtype for index in indices):
        group: list[int] = []
        size = 0
        for index in indices:
            if tensors[index].dtype != dtype:
                continue
            group.append(index)
            size += tensors[index].nbytes
            if size >= limit:
                yield group
                group, size = [], 0
        if group:
            yield group


def _use_device(device: torch.device) -> None:
    """Select the GPU of this rank in a new thread, which starts with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
