"""What there is on this machine, as plain facts; whether that is good is up to checks.py."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.launch.environment import usable_cores
from paceline.launch.network import address_of

SMI_S = 20.0  # a driver that is not loaded yet needs seconds
QUERY = "driver_version,name,memory.total,memory.used"


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver sees it; memory in MB, None where the driver does not tell."""

    name: str
    memory_mb: int | None
    used_mb: int | None


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    address: str
    mbit_per_s: int | None


@dataclass(frozen=True)
class Machine:
    """This machine, as far as a run cares; sizes in bytes, None for what cannot be known here."""

    system: str
    python: str
    torch: str
    has_gloo: bool
    cuda: str | None  # that torch was built for
    nccl: str | None
    usable_gpus: int  # by torch
    complaint: str | None  # of torch, when it was asked for GPUs
    driver: str | None
    gpus: tuple[Gpu, ...]  # of the driver, whatever CUDA_VISIBLE_DEVICES says
    cores: int  # that this process may use
    cores_of_machine: int
    core_quota: float | None  # of a container or a job
    memory: int | None
    free_memory: int | None
    free_shared_memory: int | None
    open_files: int
    folder: Path
    free_disk: int
    is_writable: bool
    interfaces: tuple[Interface, ...]
    infiniband: tuple[str, ...]


def gather(folder: Path) -> Machine:
    """The facts of this machine; `folder` is where runs shall go, and need not exist yet."""
    usable_gpus, complaint = ask_torch()
    driver, gpus = ask_driver()
    memory, free_memory = read_memory()
    there = nearest(folder)
    shared = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        cuda=torch.version.cuda,
        nccl=nccl_version(),
        usable_gpus=usable_gpus,
        complaint=complaint,
        driver=driver,
        gpus=gpus,
        cores=usable_cores(),
        cores_of_machine=os.cpu_count() or 1,
        core_quota=core_quota(own_cgroups()),
        memory=memory,
        free_memory=free_memory,
        free_shared_memory=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        folder=there,
        free_disk=shutil.disk_usage(there).free,
        is_writable=os.access(there, os.W_OK | os.X_OK),
        interfaces=tuple(interfaces()),
        infiniband=names_in(Path("/sys/class/infiniband")),
    )


def nearest(folder: Path) -> Path:
    """The folder itself, or the first above it that exists."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


# --- GPUs ----------------------------------------------------------------------------------------------------------


def ask_torch() -> tuple[int, str | None]:
    """How many GPUs torch can use, and what it says if something is wrong with them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, str(caught[0].message).splitlines()[0] if caught else None


def nccl_version() -> str | None:
    """The NCCL that torch brings along."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]


def ask_driver() -> tuple[str | None, tuple[Gpu, ...]]:
    """The version of NVIDIA's driver and its GPUs."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """What nvidia-smi's lines say (pure)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == QUERY.count(",") + 1]
    gpus = tuple(Gpu(name, _number(total), _number(used)) for _, name, total, used in rows)
    return (rows[0][0] if rows else None), gpus


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


# --- cores and memory ----------------------------------------------------------------------------------------------


def own_cgroups(root: Path = Path("/")) -> list[Path]:
    """The control groups (version 2) that this process is in, the innermost first: containers and jobs have limits."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top = root / "sys/fs/cgroup"
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    inner = top / own
    return [path for path in (inner, *inner.parents) if path == top or top in path.parents]


def core_quota(groups: list[Path]) -> float | None:
    """How many cores' time the control groups leave to this process."""
    quotas = [_words(group / "cpu.max") for group in groups]
    known = [int(words[0]) / int(words[1]) for words in quotas if len(words) == 2 and words[0].isdecimal()]
    return min(known, default=None)


def read_memory() -> tuple[int | None, int | None]:
    """The memory of this machine, and how much of it a process can still have."""
    fields = table_in(Path("/proc/meminfo"))
    if "MemAvailable" not in fields:
        return None, None
    total, free = 1024 * fields["MemTotal"], 1024 * fields["MemAvailable"]
    for group in own_cgroups():
        limit = free_in(group)
        free = free if limit is None else min(free, limit)
    return total, free


def free_in(group: Path) -> int | None:
    """What a control group leaves of its memory; None without a limit. Files in the cache give way."""
    limit, used = _words(group / "memory.max"), _words(group / "memory.current")
    if not limit or not used or not limit[0].isdecimal():
        return None
    return max(0, int(limit[0]) - int(used[0]) + table_in(group / "memory.stat").get("inactive_file", 0))


def table_in(path: Path) -> dict[str, int]:
    """The numbers of a file of the kernel, by the words before them."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {match[1]: int(match[2]) for match in re.finditer(r"^(\w+):?\s+(\d+)", text, re.M)}


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


# --- the network ---------------------------------------------------------------------------------------------------


def interfaces() -> Iterator[Interface]:
    """The interfaces of this machine that ranks can use: up, and with an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            kernel = Path("/sys/class/net") / name
            speed = _words(kernel / "speed")  # "-1" where there is no such thing
            with suppress(OSError):  # it has no address
                address = address_of(name, probe)
                if _words(kernel / "operstate") != ["down"]:
                    yield Interface(name, address, _number(speed[0]) if speed else None)


def names_in(folder: Path) -> tuple[str, ...]:
    """The names in a folder that may not exist."""
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()
