"""The process group of a run: ranks, device, backend, and decisions that all ranks agree on."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.system import shared_numbers, shared_sum
from paceline.system.allocator import keep_freed_memory
from paceline.system.shared_numbers import SharedNumbers
from paceline.system.shared_sum import SharedSum

T = TypeVar("T")
# Of every process group: our watchdog reports more than a timeout of Gloo or NCCL. The most that 31 bits of ms hold.
COLLECTIVE_TIMEOUT = timedelta(days=20)
# Torch's own monitor of NCCL ends a process whose interpreter is stuck; our watchdog does so too, and reports where.
# The monitor also dumps a trace when the store has the key of a failed rank. torchrun's store keeps that key over a
# restart, so a run that has recovered would wait for the end of the dump when it exits.
NCCL_MONITOR = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
# Set by tests and benchmarks: ranks that share a GPU use NCCL, each as if it were a host of its own.
NCCL_ON_SHARED_GPU = "PACELINE_NCCL_ON_SHARED_GPU"


@dataclass(frozen=True)
class World:
    """This rank's place among the others. Methods are collectives: all ranks call them, in the same order."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str
    warnings: tuple[str, ...] = ()  # about the environment that this process joined with

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes to the run folder."""
        return self.rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """The value that `choose` returns on rank 0, on all ranks; if it raises there, all ranks raise."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome = [choose(), None]
            except Exception as error:  # noqa: BLE001 - it is raised again, on every rank
                outcome = [None, error]
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        value, raised = outcome
        if raised is not None:
            raise raised
        return value  # type: ignore[no-any-return]

    def gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of every rank, all of one shape, in rank order, on all ranks."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous())
        return gathered

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows of every rank, in rank order, on all ranks; ranks may have different numbers of rows."""
        form = crc32(repr((rows.shape[1:], rows.dtype)).encode())
        sizes = [each.tolist() for each in self.gather_equal(torch.tensor([len(rows), form], device=self.device))]
        if any(each != form for _, each in sizes):
            raise ConfigError(
                f"the rows of the ranks differ: those of rank {self.rank} have the shape {tuple(rows.shape[1:])} and "
                f"the type {rows.dtype}; gather tensors of one shape and type"
            )
        lengths = [length for length, _ in sizes]
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return [part[:length] for part, length in zip(self.gather_equal(padded), lengths, strict=True)]

    def gather_objects(self, thing: T) -> list[T]:
        """Anything that pickles, from every rank, in rank order, on all ranks."""
        if self.size == 1:
            return [thing]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, thing)
        return gathered

    def gather_on_main(self, thing: T) -> list[T]:
        """Anything that pickles, from every rank, in rank order, in the host memory of rank 0; empty on the others."""
        if self.size == 1:
            return [thing]
        group = None if self.backend == "gloo" else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(thing, gathered, dst=0, group=group)
        return gathered or []

    def shared_sum(self) -> SharedSum | None:
        """Sums through the memory of the host; None unless all ranks are on one host, with tensors on the CPU."""
        if self.size == 1 or self.device.type != "cpu":
            return None
        return _shared(self, partial(shared_sum.create, self.size), lambda path: SharedSum(path, self.rank, self.size))

    def exchange(self, width: int | None = None) -> Exchange:
        """A new exchange of up to `width` whole numbers between the ranks."""
        return Exchange(self, width or EXCHANGED)


EXCHANGED = 8  # numbers at most, unless a caller needs more


class Exchange:
    """The maximum over ranks of a few integers, computed while the ranks continue to work.

    Ranks of one host read each other's numbers from memory, which costs next to nothing. Those of several hosts have a
    process group for it, on the CPU, so it neither waits for the device nor for other collectives.
    """

    def __init__(self, world: World, width: int = EXCHANGED) -> None:
        """For up to `width` numbers. All ranks."""
        self._width = width
        self._shared = _shared_numbers(world, width) if world.size > 1 else None
        uses_group = world.size > 1 and self._shared is None
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if uses_group else None
        self._mine: tuple[int, ...] = ()
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None  # by `begin`, to the group
        self._largest: list[int] | None = None  # the result for `end`, if it is known already

    def begin(self, *numbers: int) -> None:
        """Send this rank's numbers. All ranks."""
        self._mine, self._largest = numbers, None
        if self._shared is not None:
            self._shared.post(numbers)
        elif self._group is not None:
            sent = torch.tensor([*numbers, *[0] * (self._width - len(numbers))], dtype=torch.int64)
            self._sent = sent, dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end(self) -> list[int]:
        """The largest of each number that any rank has sent. All ranks."""
        if self._largest is None:
            self._largest = self._complete()
        return self._largest[: len(self._mine)]

    def meet(self, *numbers: int) -> list[int]:
        """The largest of each number that any rank sends, at once; `begin` may be waiting for its `end`. All ranks."""
        begun = self._mine, self.end() if self._mine else None
        self.begin(*numbers)
        largest = self.end()
        self._mine, self._largest = begun
        return largest

    def _complete(self) -> list[int]:
        if self._shared is not None:
            return [max(each) for each in zip(*self._shared.gather(), strict=True)]
        if self._sent is None:
            return list(self._mine)
        (sent, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        return sent.tolist()  # type: ignore[no-any-return]


def _shared_numbers(world: World, width: int) -> SharedNumbers | None:
    """Memory for the numbers of all ranks, if they are on one host and can share it. All ranks."""
    return _shared(
        world,
        partial(shared_numbers.create, world.size, width),
        lambda path: SharedNumbers(path, world.rank, world.size, width),
    )


def _shared(world: World, create: Callable[[], Path | None], use: Callable[[Path], T]) -> T | None:
    """What each rank makes of a file that rank 0 has created; None unless all ranks can open it. All ranks."""
    path: Path | None = None
    if world.is_main:
        with suppress(OSError):
            path = create()
    used: T | None = None
    try:
        hosts, paths = zip(*world.gather_objects((socket.gethostname(), path)), strict=True)
        if len(set(hosts)) == 1 and paths[0] is not None:
            with suppress(OSError):  # in another container of that host, for example
                used = use(paths[0])
        is_shared = all(world.gather_objects(used is not None))
    finally:  # it is open where it is used
        if path is not None:
            path.unlink(missing_ok=True)
    return used if is_shared else None


@contextmanager
def join(config: Config, store: Path | None = None) -> Iterator[World]:
    """Join the process group that the environment describes; `store` is a file that all ranks of one machine see.

    All ranks. Without `store` the ranks join at MASTER_ADDR:MASTER_PORT, as torchrun sets it.
    """
    rank, size, local_rank = (int(_env_variable(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = pick_device(config.device, local_rank)
    backend = pick_backend(config.backend, device, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    if backend == "nccl" and NCCL_ON_SHARED_GPU in os.environ:
        # NCCL compares hosts and GPUs, and refuses two ranks that have both in common.
        os.environ.update(NCCL_HOSTID=f"{socket.gethostname()}-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    if store is not None:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    for name in NCCL_MONITOR:
        os.environ.setdefault(name, "0")
    _configure_torch(config, device)
    notes = _lower_debug_level()
    dist.init_process_group(
        backend,
        store=_unused_store(rank, size) if store is None else dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    world = World(rank=rank, local_rank=local_rank, size=size, device=device, backend=backend, warnings=notes)
    yield world
    # Reached only without an error: after one, another rank may be waiting in a collective, and the process ends.
    if not dist.is_initialized():  # the user's own loop may have destroyed the group
        return
    world.gather_equal(torch.zeros(1, device=device))  # no rank leaves while another waits for its last message
    gc.collect()  # DDP is part of reference cycles and would keep the group
    dist.destroy_process_group()


_joins = itertools.count()


@functools.cache
def _env_store(rank: int, size: int) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT; rank 0 may be its server, so there is one for the process's lifetime."""
    store, _, _ = next(dist.rendezvous("env://", rank, size))
    return store  # type: ignore[no-any-return]


def _unused_store(rank: int, size: int) -> dist.Store:
    """A part of the store that no earlier run of this process and no earlier attempt under torchrun has used.

    Keys of an earlier one, such as the address of a rank that has ended, would be mistaken for new ones.
    """
    # A store of the agent outlives the ranks. Otherwise it is a new one, and agents of several hosts count differently.
    is_old = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_old else "0"
    return dist.PrefixStore(f"paceline-{attempt}-{next(_joins)}", _env_store(rank, size))


def _lower_debug_level() -> tuple[str, ...]:
    """Lower torch's debug level from DETAIL to INFO, and return a warning that reports it.

    With DETAIL, the constructor of DistributedDataParallel ends the process with SIGSEGV (torch 2.13 on the CPU).
    """
    asked = os.environ.get(DEBUG_VARIABLE, "").upper()
    if asked != "DETAIL" and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return ()
    os.environ[DEBUG_VARIABLE] = "INFO"  # torch reads it when it is imported, and again for each process group
    dist.set_debug_level(dist.DebugLevel.INFO)
    return (f"{DEBUG_VARIABLE}=DETAIL crashes torch's DistributedDataParallel; INFO is used instead",)


def _configure_torch(config: Config, device: torch.device) -> None:
    """Set the threads, the device, its memory and deterministic kernels of this process, for every task."""
    use_threads(config)
    if device.type == "cuda":
        is_exact = config.exact and config.keeps_state
        if is_exact:  # cuBLAS reads this when the first context is created
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(is_exact)  # with warn_only, attention would not be deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        use_tf32(config.tf32)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()


def use_tf32(wanted: bool) -> None:
    """Allow or forbid TF32 in matrix products and convolutions of fp32."""
    # Not by `fp32_precision`: once it is set, torch.compile raises where it reads the older settings (up to 2.13).
    # Some versions warn that these are old.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        torch.set_float32_matmul_precision("high" if wanted else "highest")
        torch.backends.cudnn.allow_tf32 = wanted


def use_threads(config: Config) -> None:
    """Set the number of threads of an operator, if the config has it."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def world_size() -> int:
    """The number of ranks in the environment, before they have joined."""
    return int(_env_variable("WORLD_SIZE"))


def is_joined() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank; ranks beyond the number of GPUs share them."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda but torch finds no GPU; use device: cpu, or check `nvidia-smi`")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(wanted: str, device: torch.device, local_world_size: int) -> str:
    """NCCL where every rank has a GPU of its own, else Gloo."""
    is_shared = device.type == "cuda" and local_world_size > torch.cuda.device_count()
    shared = is_shared and NCCL_ON_SHARED_GPU not in os.environ
    if wanted == "nccl" and (device.type == "cpu" or shared):
        reason = "the ranks run on the CPU" if device.type == "cpu" else f"{local_world_size} ranks share fewer GPUs"
        raise ConfigError(f"backend=nccl cannot be used: {reason}; use backend: gloo")
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" and not shared else "gloo"


def _env_variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None and name == "LOCAL_RANK":  # a script that was started manually, one rank per machine
        return "0"
    if value is None:
        raise ConfigError(f"{name} is not set; start the ranks with paceline, torchrun, or set RANK and WORLD_SIZE")
    return value
