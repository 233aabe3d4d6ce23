"""One process of a measurement: `python -m paceline.tools.bench.worker JOB`, where JOB is a `BenchJob` as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.system.processes import die_with_parent
from paceline.tools.bench.contenders import CONTENDERS
from paceline.tools.bench.models import WORKLOADS
from paceline.tools.bench.setup import LoopSetup, WindowTimer

WARM_UP = 2  # windows that are not counted


@dataclass(frozen=True)
class BenchJob:
    """The measurement of one process, and the folder for its outcome."""

    contender: str
    model: str
    procs: int
    rank: int
    device: str  # cpu or cuda
    threads: int
    workers: int
    steps: int
    window: int
    folder: str
    parent: int  # a process ID

    def to_json(self) -> str:
        """The job as an argument of the process."""
        return json.dumps(asdict(self))

    @property
    def outcome(self) -> Path:
        """The file with the step time of this rank, or with its error."""
        return Path(self.folder) / f"outcome-{self.rank}.json"


def main() -> None:
    """Measure, and write the outcome to a file."""
    job = BenchJob(**json.loads(sys.argv[1]))
    die_with_parent(job.parent)
    try:
        outcome = measure(job)
    except BaseException as error:  # noqa: BLE001 - every error is reported
        reason = " ".join(" ".join(str(error).splitlines()[:2]).split())
        job.outcome.write_text(json.dumps({"error": f"{type(error).__name__}: {reason}"}), encoding="utf-8")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # immediately: threads of this process may wait for other ranks in a collective
    job.outcome.write_text(json.dumps(outcome), encoding="utf-8")


def measure(job: BenchJob) -> dict[str, object]:
    """The median time of a step over the windows after the warm-up. All ranks."""
    torch.set_num_threads(job.threads)
    is_gpu = job.device == "cuda"
    device = torch.device("cuda", job.rank % torch.cuda.device_count()) if is_gpu else torch.device("cpu")
    contender, workload = CONTENDERS[job.contender], WORKLOADS[job.model]
    timer = WindowTimer(job.steps + WARM_UP * job.window, job.window, device)
    setup = LoopSetup(workload, job.rank, job.procs, device, job.workers, timer)
    if contender.starts_ranks:
        contender.loop(setup)
        has_ddp = job.procs > 1  # a single rank of Paceline has nothing to reduce, and does not use DDP
    else:
        _join(job, device)
        has_ddp = _has_ddp(contender.loop(setup))
        _leave()
    counted = timer.seconds[WARM_UP:]
    return {"us_per_step": 1e6 * statistics.median(counted) / job.window, "windows": len(counted), "has_ddp": has_ddp}


def _join(job: BenchJob, device: torch.device) -> None:
    """Create the process group that libraries use. Its store is a file, so that no port is opened. All ranks."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    has_own_gpu = device.type == "cuda" and job.procs <= torch.cuda.device_count()
    backend = "nccl" if has_own_gpu else "gloo"
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(job.folder) / "store"), job.procs),
        rank=job.rank,
        world_size=job.procs,
        device_id=device if backend == "nccl" else None,
    )


def _leave() -> None:
    """Leave the process group once all ranks have received their last messages. All ranks."""
    with suppress(ValueError):  # a library has destroyed the group already
        dist.barrier()
        dist.destroy_process_group()


def _has_ddp(model: nn.Module | None) -> bool:
    return model is not None and any(isinstance(part, DistributedDataParallel) for part in model.modules())


if __name__ == "__main__":
    main()
