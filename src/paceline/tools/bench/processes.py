"""The processes of one measurement: one for each rank, or a single one if the loop starts its ranks itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.system.cores import chosen_threads
from paceline.tools.bench.contenders import CONTENDERS
from paceline.tools.bench.models import WORKLOADS
from paceline.tools.bench.worker import BenchJob

LONGEST_WINDOW = 400  # steps
LEAST_WINDOWS = 5
LIMIT_S = 900.0  # for one loop in one round
POLL_S = 0.05


@contextmanager
def jobs_of(
    model: str, contender: str, procs: int, steps: int | None, workers: int, device: str
) -> Iterator[list[BenchJob]]:
    """The jobs of one measurement, with a temporary folder that exists inside the `with` block."""
    workload = WORKLOADS[model]
    steps = steps or workload.steps[device]
    window = window_of(steps, -(-workload.samples // (workload.batch_size * procs)))
    ranks = 1 if CONTENDERS[contender].starts_ranks else procs
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        yield [
            BenchJob(
                contender=contender, model=model, procs=procs, rank=rank, device=device,
                threads=chosen_threads(procs), workers=workers, steps=steps, window=window, folder=folder,
                parent=os.getpid(),
            )
            for rank in range(ranks)
        ]  # fmt: skip


def window_of(steps: int, per_epoch: int) -> int:
    """The steps of one window (pure). They divide an epoch, because the end of an epoch cuts a window short."""
    longest = min(LONGEST_WINDOW, steps // LEAST_WINDOWS)
    return max((length for length in range(1, longest + 1) if per_epoch % length == 0), default=1)


def run_jobs(jobs: Sequence[BenchJob]) -> dict[str, Any]:
    """Run the jobs side by side; returns the outcome of rank 0, or of the first rank that fails."""
    with (Path(jobs[0].folder) / "log.txt").open("wb") as log:
        processes = [_start(job, log) for job in jobs]
        try:
            first = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if first is None:
        return {"error": f"not finished after {LIMIT_S:.0f} s"}
    with suppress(OSError):
        outcome: dict[str, Any] = json.loads(jobs[first].outcome.read_text(encoding="utf-8"))
        return outcome
    return {"error": f"rank {first} ended with exit code {processes[first].returncode}"}


def _start(job: BenchJob, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.tools.bench.worker", job.to_json()]
    variables = [f"{name}={value}" for name, value in _environment(job).items()]
    # Not in the user's folder: Python would import modules from it, such as a folder named `datasets`.
    return subprocess.Popen(
        ["env", *variables, *command], cwd=job.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


def _environment(job: BenchJob) -> dict[str, object]:
    """The variables that torchrun sets for a rank, and for all loops the threads that Paceline uses."""
    threads: dict[str, object] = {"OMP_NUM_THREADS": job.threads}
    if job.procs > 1:
        threads["OMP_WAIT_POLICY"] = "passive"
    if CONTENDERS[job.contender].starts_ranks:
        return threads
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return threads | {
        "RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.procs, "LOCAL_WORLD_SIZE": job.procs,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,  # never used: the process group exists already
        "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback,
    }  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that fails, or 0 when all have succeeded; None after LIMIT_S."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return 0
        time.sleep(POLL_S)
    return None
