"""Checks: each computes one finding from facts about the machine or the config (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.config import Config
from paceline.formatting import ranks_text, size_text
from paceline.tools.doctor.facts import MachineFacts

OLDEST_TORCH = (2, 11)
MIN_MEMORY = 2 << 30  # a rank needs 0.3 to 1 GB before it has a model
MIN_SHARED_MEMORY = 512 << 20  # Docker gives 64 MB; DataLoader workers and NCCL pass data through it
MIN_DISK = 1 << 30
MIN_OPEN_FILES = 1024  # DataLoader workers open one for each tensor that they send
MAX_GPU_USE = 0.1  # the share of a GPU's memory that other processes may use without a warning
MIN_BYTES_PER_S = {"nccl": 4e9, "gloo": 0.1e9}  # of an all-reduce: far below the bandwidth of PCIe and loopback
FIX_IT = "fix it, then run paceline doctor again"
FREE_DISK = "free some disk space, or choose another folder with --run-dir"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is the fix for a warning or a failure."""

    name: str
    state: Literal["ok", "warning", "failure"]
    text: str
    advice: str = ""


@dataclass(frozen=True)
class RehearsalResult:
    """The measurements of a rehearsal on the CPU; sizes in bytes."""

    ranks: int
    seconds: float
    is_own_loop: bool = False
    loss: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    checkpoint: int | None = None
    memory: int | None = None  # the maximum of a rank


def failure_of(name: str, sentence: str) -> Finding:
    """A failure from the text of an error, `<problem>; <fix>`."""
    text, _, advice = sentence.partition("; ")
    return Finding(name, "failure", text, advice or FIX_IT)


# --- the machine ---------------------------------------------------------------------------------------------------


def check_machine(machine: MachineFacts) -> Iterator[Finding]:
    """The findings that need no config."""
    yield Finding("python", "ok", f"{machine.python}, {machine.system}")
    yield check_torch(machine)
    yield check_gpus(machine)
    if machine.usable_gpus:
        yield check_nccl(machine)
    yield check_cores(machine)
    yield check_memory(machine)
    yield check_shared_memory(machine)
    yield check_open_files(machine)
    yield check_disk(machine)
    yield check_network(machine)


def check_torch(machine: MachineFacts) -> Finding:
    """Whether torch is new enough and has Gloo."""
    version = tuple(int(part) for part in re.findall(r"\d+", machine.torch)[:2])
    text = f"{machine.torch}, {f'built for CUDA {machine.cuda}' if machine.cuda else 'built without CUDA'}"
    if version < OLDEST_TORCH:
        return Finding("torch", "failure", text, "Paceline needs torch 2.11 or newer: pip install -U torch")
    if not machine.has_gloo:
        return Finding("torch", "failure", f"{text}, without Gloo", "install a build of torch with Gloo")
    return Finding("torch", "ok", text)


def check_gpus(machine: MachineFacts) -> Finding:
    """Whether torch can use the GPUs of the driver, and whether other processes use them."""
    names = [gpu.name for gpu in machine.gpus]
    listed = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    if machine.usable_gpus == 0 and not machine.gpus:
        return Finding("gpu", "ok", "none; runs use the CPU")
    if machine.usable_gpus == 0:
        reason = f" ({machine.gpu_warning})" if machine.gpu_warning else ""
        text = f"torch cannot use {listed}, driver {machine.driver}{reason}"
        if machine.cuda is None:
            return Finding("gpu", "warning", text, "install torch built for CUDA, see pytorch.org")
        return Finding(
            "gpu", "warning", text, f"check CUDA_VISIBLE_DEVICES, and install a driver for CUDA {machine.cuda}"
        )
    driver = f"driver {machine.driver}" if machine.driver else "driver unknown, nvidia-smi does not respond"
    text = f"{machine.usable_gpus} usable by torch; {listed or 'names unknown'}, {driver}"
    used = [
        f"GPU {number} has {gpu.used_mb:,} of {gpu.memory_mb:,} MB in use"
        for number, gpu in enumerate(machine.gpus)
        if gpu.used_mb is not None and gpu.memory_mb is not None and gpu.used_mb > MAX_GPU_USE * gpu.memory_mb
    ]
    if used:
        advice = "find the processes with nvidia-smi, or choose other GPUs"
        return Finding("gpu", "warning", f"{text}; {', '.join(used)}", advice)
    return Finding("gpu", "ok", text)


def check_nccl(machine: MachineFacts) -> Finding:
    """Whether torch has NCCL, which GPUs need to communicate."""
    if machine.nccl is None:
        return Finding(
            "nccl", "failure", "this build of torch has no NCCL", "install a build with NCCL, or use backend: gloo"
        )
    return Finding("nccl", "ok", machine.nccl)


def check_cores(machine: MachineFacts) -> Finding:
    """Whether the CPU time of this process suffices for a thread on each of its cores."""
    text = f"{machine.cores} of {machine.cores_of_machine} cores for this process"
    quota = machine.core_quota
    if quota is not None and quota < machine.cores:
        whole = max(1, math.floor(quota))
        return Finding(
            "cores", "warning", f"{text}, but its container or job is limited to the CPU time of {quota:g}",
            f"set OMP_NUM_THREADS={whole} or `threads`, or request whole cores",
        )  # fmt: skip
    return Finding("cores", "ok", text)


def check_memory(machine: MachineFacts) -> Finding:
    """Whether there is enough free memory for a rank."""
    text = f"{size_text(machine.free_memory)} free of {size_text(machine.memory)}"
    if machine.free_memory < MIN_MEMORY:
        return Finding(
            "memory", "warning", text, "stop other programs, or request more memory for the job or container"
        )
    return Finding("memory", "ok", text)


def check_shared_memory(machine: MachineFacts) -> Finding:
    """Whether shared memory suffices for the batches of DataLoader workers."""
    free = machine.free_shared_memory
    if free is None:
        return Finding("shared memory", "ok", "no /dev/shm on this system")
    text = f"{size_text(free)} free in /dev/shm"
    if free < MIN_SHARED_MEMORY:
        advice = "start the container with --shm-size=8g, or keep workers: 0"
        return Finding("shared memory", "warning", text, advice)
    return Finding("shared memory", "ok", text)


def check_open_files(machine: MachineFacts) -> Finding:
    """Whether a process may open as many files as DataLoader workers need."""
    count = machine.open_files
    text = f"{count:,} per process" if 0 <= count < 1 << 31 else "no limit"
    if 0 <= count < MIN_OPEN_FILES:
        return Finding("open files", "warning", text, f"ulimit -n {4 * MIN_OPEN_FILES}")
    return Finding("open files", "ok", text)


def check_disk(machine: MachineFacts) -> Finding:
    """Whether a run folder can be created, and has disk space."""
    text = f"{size_text(machine.free_disk)} free at {machine.folder}"
    if not machine.is_writable:
        return Finding("disk", "failure", f"{machine.folder} cannot be written to", "choose another with --run-dir")
    if machine.free_disk < MIN_DISK:
        return Finding("disk", "warning", text, FREE_DISK)
    return Finding("disk", "ok", text)


def check_network(machine: MachineFacts) -> Finding:
    """Whether there is a loopback interface, over which the ranks of one machine communicate."""
    listed = []
    for interface in machine.interfaces:
        speed = f", {interface.mbit_per_s / 1000:g} Gbit/s" if interface.mbit_per_s else ""
        listed.append(f"{interface.name} ({interface.address}{speed})")
    text = ", ".join(listed) or "no interface has an IPv4 address"
    if machine.infiniband:
        text += f"; InfiniBand: {', '.join(machine.infiniband)}"
    if not any(interface.address.startswith("127.") for interface in machine.interfaces):
        return Finding(
            "network", "failure", f"{text}; no loopback interface, which local ranks need", "ip link set lo up"
        )
    return Finding("network", "ok", text)


# --- the config ----------------------------------------------------------------------------------------------------


def check_ranks(ranks: int, device: str, backend: str, machine: MachineFacts) -> Finding:
    """Whether there is a core for each rank of the run on this machine."""
    text = f"{ranks_text(ranks)} on {device} ({backend}) on this machine"
    if ranks > machine.cores:
        return Finding("ranks", "warning", f"{text}, for {machine.cores} cores", f"use --procs {machine.cores} or less")
    return Finding("ranks", "ok", text)


def check_rehearsal(result: RehearsalResult) -> Finding:
    """Whether the rehearsed step has a finite loss."""
    where = f"on the CPU with {ranks_text(result.ranks)}, {result.seconds:.1f} s"
    if result.is_own_loop:
        text = f"model and data were built {where}; train_fn was not called, because it cannot be stopped after a step"
        return Finding("rehearsal", "ok", text)
    memory = f", {size_text(result.memory)} per rank" if result.memory is not None else ""
    measured = "".join(f", {name} {value:.4g}" for name, value in result.metrics)
    if result.loss is None or not math.isfinite(result.loss):
        return Finding(
            "rehearsal", "warning", f"one step {where}{memory}, but its loss is not finite{measured}",
            "check the data, the loss and the learning rate; docs/reliability.md explains the key `nan`",
        )  # fmt: skip
    return Finding("rehearsal", "ok", f"one step {where}{memory}: loss {result.loss:.4g}{measured}")


def check_rank_memory(result: RehearsalResult, ranks: int, device: str, machine: MachineFacts) -> Finding | None:
    """Whether the ranks of a run on the CPU fit into memory; None if that is unknown."""
    if result.memory is None or device != "cpu":
        return None
    needed = ranks * result.memory
    verb = "needs" if ranks == 1 else "need"
    text = f"{ranks_text(ranks)} {verb} more than {size_text(needed)}, {size_text(machine.free_memory)} are free"
    if needed > machine.free_memory:
        return Finding("rank memory", "warning", text, "use fewer processes, or a machine with more memory")
    return Finding("rank memory", "ok", text)


def check_checkpoints(size: int, config: Config, machine: MachineFacts) -> Finding:
    """Whether the disk has space for the checkpoints that the run keeps and the one being written."""
    kept = config.checkpoint.keep + (config.checkpoint.best is not None)
    text = f"{size_text(size)} each; {size_text(machine.free_disk)} free at {machine.folder}"
    if machine.free_disk < 2 * size:
        return Finding("checkpoints", "failure", f"{text}, two of them need {size_text(2 * size)}", FREE_DISK)
    needed = (kept + 1) * size
    if machine.free_disk < needed:
        text += f", {kept} that are kept and one being written need {size_text(needed)}"
        return Finding("checkpoints", "warning", text, f"{FREE_DISK}, or keep fewer (checkpoint.keep)")
    return Finding("checkpoints", "ok", text)


def check_bandwidth(size: int, seconds: float, ranks: int, backend: str) -> Finding:
    """Whether an all-reduce is as fast as it is on most machines."""
    speed = bytes_per_s(size, seconds, ranks)
    example = f"{1e3 * seconds:.1f} ms for {size / 1e6:.0f} MB"
    text = f"{speed / 1e9:.2f} GB/s among {ranks_text(ranks)} ({backend}); {example}"
    if speed >= MIN_BYTES_PER_S[backend]:
        return Finding("all-reduce", "ok", text)
    advice = (
        "check the output of `nvidia-smi topo -m`"
        if backend == "nccl"
        else "check whether other programs use the cores"
    )
    return Finding("all-reduce", "warning", f"{text}, which is slow", advice)


def bytes_per_s(size: int, seconds: float, ranks: int) -> float:
    """The bandwidth of each rank: an all-reduce moves 2 (n - 1) / n of the data through each of n ranks."""
    return 2 * (ranks - 1) / ranks * size / max(seconds, 1e-9)
