"""One contender in one process: `python -m paceline.tools.bench.worker JOB`, where JOB is a `Job` as JSON."""

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

from paceline.system.parent import die_with_parent
from paceline.tools.bench.contenders import CONTENDERS, Clock, Setting
from paceline.tools.bench.models import WORKLOADS
from paceline.world import pick_backend, pick_device

WARM_UP = 2  # windows that are not counted


@dataclass(frozen=True)
class Job:
    """What one process measures, and where it leaves what it finds."""

    contender: str
    model: str
    procs: int
    rank: int
    device: str
    threads: int
    workers: int
    steps: int
    window: int
    folder: str
    parent: int

    def to_json(self) -> str:
        """The form in which it travels."""
        return json.dumps(asdict(self))

    @property
    def outcome(self) -> Path:
        """The file with the figures of this rank, or with its error."""
        return Path(self.folder) / f"outcome-{self.rank}.json"


def main() -> None:
    """Measure, and leave the outcome as a file."""
    job = Job(**json.loads(sys.argv[1]))
    die_with_parent(job.parent)
    try:
        outcome = measure(job)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told
        story = " ".join(" ".join(str(error).splitlines()[:2]).split())
        job.outcome.write_text(json.dumps({"error": f"{type(error).__name__}: {story}"}), encoding="utf-8")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # neighbours may wait for this rank in a collective, and their threads for them
    job.outcome.write_text(json.dumps(outcome), encoding="utf-8")


def measure(job: Job) -> dict[str, object]:
    """The median time of a step over the windows after the warm-up. All ranks."""
    torch.set_num_threads(job.threads)
    device = pick_device(job.device, job.rank)
    contender, workload = CONTENDERS[job.contender], WORKLOADS[job.model]
    clock = Clock(job.steps + WARM_UP * job.window, job.window, device)
    setting = Setting(workload, job.rank, job.procs, device, job.workers, clock)
    if contender.starts_ranks:
        contender.loop(setting)
        has_ddp = job.procs > 1  # a single rank of Paceline has nothing to reduce, and steps go past DDP
    else:
        _join(job, device)
        has_ddp = _has_ddp(contender.loop(setting))
        _leave()
    counted = clock.seconds[WARM_UP:]
    return {"us_per_step": 1e6 * statistics.median(counted) / job.window, "windows": len(counted), "has_ddp": has_ddp}


def _join(job: Job, device: torch.device) -> None:
    """Meet the other ranks in a file, so that no port is opened; libraries take the group that they find. All ranks."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = pick_backend("auto", device, job.procs)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(job.folder) / "store"), job.procs),
        rank=job.rank,
        world_size=job.procs,
        device_id=device if backend == "nccl" else None,
    )


def _leave() -> None:
    """Nobody goes while another still waits for its last message. All ranks."""
    with suppress(ValueError):  # a library has ended the group already
        dist.barrier()
        dist.destroy_process_group()


def _has_ddp(model: nn.Module | None) -> bool:
    return model is not None and any(isinstance(part, DistributedDataParallel) for part in model.modules())


if __name__ == "__main__":
    main()
