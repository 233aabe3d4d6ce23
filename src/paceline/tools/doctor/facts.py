"""Facts about this machine. `checks.py` derives their consequences for a run."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from paceline.system.cores import usable_cores

SMI_TIMEOUT_S = 20.0  # a driver that is not loaded yet responds only after seconds
SMI_FIELDS = "driver_version,name,memory.total,memory.used"


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it; None where it does not report the memory."""

    name: str
    memory_mb: int | None
    used_mb: int | None


@dataclass(frozen=True)
class Interface:
    """An IPv4 address of a network interface that is up."""

    name: str
    address: str
    mbit_per_s: int  # 0 if unknown


@dataclass(frozen=True)
class MachineFacts:
    """The properties of this machine that affect a run; sizes in bytes, None if the machine does not report a value."""

    system: str
    python: str
    torch: str
    has_gloo: bool
    cuda: str | None  # the version that torch was built for
    nccl: str | None
    usable_gpus: int  # usable by torch
    gpu_warning: str | None  # from torch, while it counted the GPUs
    driver: str | None
    gpus: tuple[Gpu, ...]  # all that the driver lists, regardless of CUDA_VISIBLE_DEVICES
    cores: int  # available to this process
    cores_of_machine: int
    core_quota: float | None  # the limit of a container or a job
    memory: int
    free_memory: int
    free_shared_memory: int | None
    open_files: int
    folder: Path
    free_disk: int
    is_writable: bool
    interfaces: tuple[Interface, ...]
    infiniband: tuple[str, ...]


def gather(folder: Path) -> MachineFacts:
    """The facts about this machine; `folder` is where run folders are created, and does not have to exist yet."""
    usable_gpus, gpu_warning = count_gpus()
    driver, gpus = query_driver()
    memory, groups = psutil.virtual_memory(), own_cgroups()
    limits = [free for group in groups if (free := free_memory_in(group)) is not None]
    existing = nearest_existing(folder)
    shared, infiniband = Path("/dev/shm"), Path("/sys/class/infiniband")
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        cuda=torch.version.cuda,
        nccl=nccl_version(),
        usable_gpus=usable_gpus,
        gpu_warning=gpu_warning,
        driver=driver,
        gpus=gpus,
        cores=usable_cores(),
        cores_of_machine=os.cpu_count() or 1,
        core_quota=core_quota(groups),
        memory=memory.total,
        free_memory=min([memory.available, *limits]),
        free_shared_memory=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        folder=existing,
        free_disk=shutil.disk_usage(existing).free,
        is_writable=os.access(existing, os.W_OK | os.X_OK),
        interfaces=interfaces(),
        infiniband=tuple(sorted(path.name for path in infiniband.glob("*"))),
    )


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or its first parent that exists."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def interfaces() -> tuple[Interface, ...]:
    """The IPv4 addresses of this machine, on interfaces that are up."""
    states = psutil.net_if_stats()
    return tuple(
        Interface(name, address.address, states[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in states and states[name].isup
    )


# --- GPUs ----------------------------------------------------------------------------------------------------------


def count_gpus() -> tuple[int, str | None]:
    """The number of GPUs that torch can use, and torch's warning if it cannot use them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, str(caught[0].message).splitlines()[0] if caught else None


def nccl_version() -> str | None:
    """The version of the NCCL that is part of torch."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]


def query_driver() -> tuple[str | None, tuple[Gpu, ...]]:
    """The version of NVIDIA's driver, and its GPUs."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """The version of the driver and its GPUs in the output of nvidia-smi (pure)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == SMI_FIELDS.count(",") + 1]
    gpus = tuple(Gpu(name, _integer(total), _integer(used)) for _, name, total, used in rows)
    return (rows[0][0] if rows else None), gpus


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


# --- limits of containers and jobs, which psutil does not report -----------------------------------------------------


def own_cgroups(root: Path = Path("/")) -> list[Path]:
    """The control groups (version 2) of this process, the innermost first."""
    own = re.search(r"^0::/*(.*)", _read(root / "proc/self/cgroup"), re.M)
    top = root / "sys/fs/cgroup"
    inner = top / (own[1] if own else "")
    return [path for path in (inner, *inner.parents) if path.is_dir() and path.is_relative_to(top)]


def core_quota(groups: list[Path]) -> float | None:
    """The CPU time that the control groups allow, as a number of cores; None without a limit."""
    limits = [re.match(r"(\d+) (\d+)", _read(group / "cpu.max")) for group in groups]
    return min((int(limit[1]) / int(limit[2]) for limit in limits if limit), default=None)


def free_memory_in(group: Path) -> int | None:
    """The bytes that a control group can still allocate, including cached files; None without a limit."""
    limit, used = (_integer(_read(group / name).strip()) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    cached = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.M)
    return max(0, limit - used + (int(cached[1]) if cached else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
