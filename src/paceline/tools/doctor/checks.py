"""What facts mean for a run: each check turns some of them into one finding (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.config import Config
from paceline.formatting import ranks_text, size_text
from paceline.tools.doctor.facts import Machine

OLDEST_TORCH = (2, 11)
LITTLE_MEMORY = 2 << 30  # a rank holds 0.3 to 1 GB before it has a model
LITTLE_SHARED_MEMORY = 512 << 20  # Docker gives 64 MB; workers of DataLoaders and NCCL pass data through it
LITTLE_DISK = 1 << 30
FEW_FILES = 1024  # workers of DataLoaders need one for each tensor on its way
IN_USE = 0.1  # of a GPU's memory, by others
MEND = "mend it, then ask again"
# Of an all-reduce, in bytes a second: far below what PCIe and a loopback interface give.
SLOW = {"nccl": 4e9, "gloo": 0.1e9}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do about a warning or a failure."""

    name: str
    state: Literal["ok", "warning", "failure"]
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Trial:
    """What one step on the CPU has shown; sizes in bytes."""

    ranks: int
    seconds: float
    is_own_loop: bool = False
    loss: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    checkpoint: int | None = None
    memory: int | None = None  # of the rank that held most


def of_machine(machine: Machine) -> Iterator[Finding]:
    """Everything that can be said without a config."""
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


def failure_of(name: str, sentence: str) -> Finding:
    """A failure from an error's sentence: `<what is wrong>; <what to do>`."""
    text, _, advice = sentence.partition("; ")
    return Finding(name, "failure", text, advice or MEND)


# --- the machine ---------------------------------------------------------------------------------------------------


def check_torch(machine: Machine) -> Finding:
    """Whether torch is new enough and can talk between processes."""
    version = tuple(int(part) for part in re.findall(r"\d+", machine.torch)[:2])
    text = f"{machine.torch}, {f'built for CUDA {machine.cuda}' if machine.cuda else 'built without CUDA'}"
    if version < OLDEST_TORCH:
        return Finding("torch", "failure", text, "Paceline needs torch 2.11 or newer: pip install -U torch")
    if not machine.has_gloo:
        return Finding("torch", "failure", f"{text}, without Gloo", "install a build of torch that has Gloo")
    return Finding("torch", "ok", text)


def check_gpus(machine: Machine) -> Finding:
    """Whether torch can use the GPUs that the driver has, and whether others use them."""
    if machine.usable_gpus == 0 and not machine.gpus:
        return Finding("gpu", "ok", "none; runs use the CPU")
    if machine.usable_gpus == 0:
        reason = f" ({machine.complaint})" if machine.complaint else ""
        text = f"torch can use none of {_listed(machine)}, driver {machine.driver}{reason}"
        if machine.cuda is None:
            return Finding("gpu", "warning", text, "install torch built for CUDA, see pytorch.org")
        return Finding("gpu", "warning", text, f"check CUDA_VISIBLE_DEVICES, and a driver for CUDA {machine.cuda}")
    driver = f"driver {machine.driver}" if machine.driver else "driver unknown, nvidia-smi does not answer"
    text = f"{machine.usable_gpus} for torch; {_listed(machine) or 'names unknown'}, {driver}"
    used = [
        f"GPU {number} has {gpu.used_mb:,} of {gpu.memory_mb:,} MB in use"
        for number, gpu in enumerate(machine.gpus)
        if gpu.used_mb is not None and gpu.memory_mb is not None and gpu.used_mb > IN_USE * gpu.memory_mb
    ]
    if used:
        return Finding("gpu", "warning", f"{text}; {', '.join(used)}", "see by whom with nvidia-smi, or choose others")
    return Finding("gpu", "ok", text)


def _listed(machine: Machine) -> str:
    names = [gpu.name for gpu in machine.gpus]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def check_nccl(machine: Machine) -> Finding:
    """Whether GPUs can talk to each other."""
    if machine.nccl is None:
        return Finding("nccl", "failure", "this torch has none", "install a build with NCCL, or use backend: gloo")
    return Finding("nccl", "ok", machine.nccl)


def check_cores(machine: Machine) -> Finding:
    """Whether as many threads would start as there are cores for them."""
    text = f"{machine.cores} of {machine.cores_of_machine} cores for this process"
    quota = machine.core_quota
    if quota is not None and quota < machine.cores:
        whole = max(1, math.floor(quota))
        return Finding(
            "cores", "warning", f"{text}, but its container or job gets the time of {quota:g}",
            f"set OMP_NUM_THREADS={whole} or `threads`, or ask for whole cores",
        )  # fmt: skip
    return Finding("cores", "ok", text)


def check_memory(machine: Machine) -> Finding:
    """Whether a rank has room."""
    if machine.memory is None or machine.free_memory is None:
        return Finding("memory", "ok", "unknown on this system")
    text = f"{size_text(machine.free_memory)} free of {size_text(machine.memory)}"
    if machine.free_memory < LITTLE_MEMORY:
        return Finding("memory", "warning", text, "end other programs, or ask for more in the job or container")
    return Finding("memory", "ok", text)


def check_shared_memory(machine: Machine) -> Finding:
    """Whether workers of DataLoaders can hand over their batches."""
    free = machine.free_shared_memory
    if free is None:
        return Finding("shared memory", "ok", "no /dev/shm on this system")
    if free < LITTLE_SHARED_MEMORY:
        return Finding(
            "shared memory", "warning", f"{size_text(free)} free in /dev/shm",
            "start the container with --shm-size=8g, or keep workers: 0",
        )  # fmt: skip
    return Finding("shared memory", "ok", f"{size_text(free)} free in /dev/shm")


def check_open_files(machine: Machine) -> Finding:
    """Whether a process may have as many files open as workers of DataLoaders need."""
    count = machine.open_files
    text = f"{count:,} for a process" if 0 <= count < 1 << 31 else "no limit"
    if 0 <= count < FEW_FILES:
        return Finding("open files", "warning", text, f"ulimit -n {4 * FEW_FILES}")
    return Finding("open files", "ok", text)


def check_disk(machine: Machine) -> Finding:
    """Whether a run folder can be made and filled."""
    text = f"{size_text(machine.free_disk)} free at {machine.folder}"
    if not machine.is_writable:
        return Finding("disk", "failure", f"{machine.folder} cannot be written to", "choose another with --run-dir")
    if machine.free_disk < LITTLE_DISK:
        return Finding("disk", "warning", text, "make room, or choose another folder with --run-dir")
    return Finding("disk", "ok", text)


def check_network(machine: Machine) -> Finding:
    """Whether ranks can meet; local ones do so on the loopback interface."""
    words = []
    for interface in machine.interfaces:
        speed = f", {interface.mbit_per_s / 1000:g} Gbit/s" if interface.mbit_per_s else ""
        words.append(f"{interface.name} ({interface.address}{speed})")
    text = ", ".join(words) or "no interface has an IPv4 address"
    if machine.infiniband:
        text += f"; InfiniBand: {', '.join(machine.infiniband)}"
    if not any(interface.address.startswith("127.") for interface in machine.interfaces):
        return Finding("network", "failure", f"{text}; no loopback, where ranks meet", "ip link set lo up")
    return Finding("network", "ok", text)


# --- the config ----------------------------------------------------------------------------------------------------


def check_ranks(ranks: int, device: str, backend: str, machine: Machine) -> Finding:
    """Whether there is a core for each rank that the run would have here."""
    text = f"{ranks_text(ranks)} on {device} ({backend}) here"
    if ranks > machine.cores:
        return Finding("ranks", "warning", f"{text}, for {machine.cores} cores", f"use --procs {machine.cores} or less")
    return Finding("ranks", "ok", text)


def check_trial(trial: Trial) -> Finding:
    """Whether the step was a good one."""
    where = f"on {ranks_text(trial.ranks)} of CPU, {trial.seconds:.1f} s"
    if trial.is_own_loop:
        return Finding(
            "rehearsal", "ok", f"model and data were built {where}; train_fn has not run, it cannot be cut after a step"
        )
    held = f", {size_text(trial.memory)} a rank" if trial.memory is not None else ""
    measured = "".join(f", {name} {value:.4g}" for name, value in trial.metrics)
    if trial.loss is None or not math.isfinite(trial.loss):
        return Finding(
            "rehearsal", "warning", f"one step {where}{held}, but its loss is not finite{measured}",
            "look at the data, the loss and the learning rate; docs/reliability.md tells what `nan` does",
        )  # fmt: skip
    return Finding("rehearsal", "ok", f"one step {where}{held}: loss {trial.loss:.4g}{measured}")


def check_rank_memory(trial: Trial, ranks: int, device: str, machine: Machine) -> Finding | None:
    """Whether the ranks of a run on the CPU have room; None if that is not known."""
    if trial.memory is None or machine.free_memory is None or device != "cpu":
        return None
    needed = ranks * trial.memory
    need = "needs" if ranks == 1 else "need"
    text = f"{ranks_text(ranks)} {need} more than {size_text(needed)}, {size_text(machine.free_memory)} are free"
    if needed > machine.free_memory:
        return Finding("rank memory", "warning", text, "use fewer processes, or a machine with more memory")
    return Finding("rank memory", "ok", text)


def check_checkpoints(size: int, config: Config, machine: Machine) -> Finding:
    """Whether the checkpoints that the run keeps fit on the disk, with the one that is being written."""
    kept = config.checkpoint.keep + (config.checkpoint.best is not None)
    text = f"{size_text(size)} each; {size_text(machine.free_disk)} free at {machine.folder}"
    advice = "make room, or choose another folder with --run-dir"
    if machine.free_disk < 2 * size:
        return Finding("checkpoints", "failure", f"{text}, two of them need {size_text(2 * size)}", advice)
    needed = (kept + 1) * size
    if machine.free_disk < needed:
        text += f", {kept} that are kept and one being written need {size_text(needed)}"
        return Finding("checkpoints", "warning", text, f"{advice}, or keep fewer (checkpoint.keep)")
    return Finding("checkpoints", "ok", text)


def check_bandwidth(size: int, seconds: float, ranks: int, backend: str) -> Finding:
    """Whether gradients travel as fast as they do on most machines."""
    speed = bus_speed(size, seconds, ranks)
    example = f"{size / 1e6:.0f} MB take {1e3 * seconds:.1f} ms"
    text = f"{speed / 1e9:.2f} GB/s among {ranks_text(ranks)} ({backend}); {example}"
    if speed >= SLOW[backend]:
        return Finding("all-reduce", "ok", text)
    advice = "look at `nvidia-smi topo -m`" if backend == "nccl" else "see whether other programs use the cores"
    return Finding("all-reduce", "warning", f"{text}, which is slow", advice)


def bus_speed(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second through each rank: a sum over n ranks moves 2 (n - 1) / n of the data, whatever their number."""
    return 2 * (ranks - 1) / ranks * size / max(seconds, 1e-9)
