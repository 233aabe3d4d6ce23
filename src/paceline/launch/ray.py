"""The launcher that starts the ranks with Ray Train.

Ray places the workers, and restarts all of them after a failure. Each worker starts one rank, an ordinary process
of Paceline's (`launch/ray_worker.py`), which finds the last checkpoint itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import ray
from ray import train
from ray.train.backend import BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer

from paceline.checkpoint import resume
from paceline.config import Config
from paceline.errors import Interrupted, RankFailed
from paceline.formatting import ranks_text
from paceline.launch import network, ray_worker
from paceline.launch.fork_server import POLL_S
from paceline.launch.machines import capacity_among, fitting, serve_store, variables_of
from paceline.launch.ray_cluster import RayResources, connected, in_thread
from paceline.launch.ray_worker import WorkerOptions
from paceline.launch.relocation import FolderWatcher
from paceline.launch.restarts import final_error, limit_of
from paceline.launch.setup import can_save, report_new_run, staged, with_lanes_and_threads, with_mirror
from paceline.observe import hangs
from paceline.observe.screen.follower import Follower
from paceline.run import job
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from paceline.run.outcome import Outcome, collect
from paceline.system.signals import StopRequest, listening

LOOPBACK = "127.0.0.1"


class NoGroup(BackendConfig):  # type: ignore[misc]
    """Ray Train creates no process group: its workers only start the ranks, which create their own."""

    backend = "none"


@dataclass(frozen=True)
class RayRun:
    """A run that Ray starts."""

    config: Config
    folder: RunFolder
    watcher: FolderWatcher
    ranks: int
    resources: RayResources
    request: StopRequest | None  # None for ranks that cannot save when they are asked to stop


def start(config: Config, task: Task) -> Outcome:
    """Start the ranks with Ray, show their progress, and return when all have ended."""
    config = with_mirror(config, task)
    request = StopRequest()
    with listening(request, "nothing was running"):
        began = time.time()
        restore_point = resume.find_restore_point(config)
        if can_save(config, task):
            report_new_run(config, restore_point)
        with connected(config.device) as resources:
            ranks = fitting(*capacity_among(config, resources.gpus, resources.cpus), restore_point.lanes(config))
            config = with_lanes_and_threads(config, restore_point, ranks, ranks, resources.ranks_per_node)
            packed = job.pack(config, task)
            with open_run(config, restore_point.run_dir) as folder, FolderWatcher(folder, config) as watcher:
                with staged(packed, folder, config), _temporary_files(folder):
                    if request.signal:
                        raise request.stopped("before it started")
                    stop_request = request if can_save(config, task) else None
                    _run(RayRun(config, folder, watcher, ranks, resources, stop_request), began)
                return collect(folder)


@contextmanager
def _temporary_files(folder: RunFolder) -> Iterator[None]:
    """Remove an old stop request at the start, and the request and Ray's own files at the end of the run."""
    ray_worker.write_request(folder, 0)
    try:
        yield
    finally:
        folder.request.unlink(missing_ok=True)
        shutil.rmtree(folder.ray, ignore_errors=True)


def _run(run: RayRun, began: float) -> None:
    """Train until the ranks have ended. Raises RankFailed if they fail or Ray no longer restarts them."""
    error = _fit(run, _trainer(run, began))
    first = ray_worker.first_failure(run.folder, run.ranks)
    if error is not None or first is not None:
        run.watcher.check()
        if first is None:
            raise RankFailed(f"Ray has stopped restarting the ranks: {error}")
        raise final_error(hangs.explain(first, run.folder, run.ranks), run.folder)
    if not run.folder.has_ending():
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {run.folder.log(0)}")


def _trainer(run: RayRun, began: float) -> TorchTrainer:
    """Ray Train's trainer: the workers, their resources, and how often they may fail."""
    can_save = run.request is not None
    options = WorkerOptions(str(run.folder.path), str(Path.cwd()), began, can_save, run.config.hang_timeout_s)
    share = run.resources.share(run.ranks, run.config.device)
    return TorchTrainer(
        _work,
        train_loop_config={"options": options},
        torch_config=NoGroup(),
        scaling_config=train.ScalingConfig(num_workers=run.ranks, use_gpu="GPU" in share, resources_per_worker=share),
        run_config=train.RunConfig(
            name="train",
            storage_path=str(run.folder.ray),
            failure_config=train.FailureConfig(max_failures=limit_of(run.config, can_save=can_save)),
            logging_config=train.LoggingConfig(log_level="ERROR"),
        ),
    )


def _fit(run: RayRun, trainer: TorchTrainer) -> BaseException | None:
    """Train, show the progress, and forward a stop request to the workers; returns Ray's error, if any."""
    folder, request = run.folder, run.request
    with (
        Follower(folder, run.ranks, from_now=True, tensorboard=run.config.log.tensorboard) as follower,
        listening(request, f"the run folder is {folder.path}"),
    ):
        if run.resources.lacks(run.ranks, run.resources.share(run.ranks, run.config.device)):
            follower.screen.note(f"the Ray cluster has no capacity for {ranks_text(run.ranks)}; waiting until it grows")
        done = in_thread(trainer.fit)
        is_passed_on = False
        while not done.done():
            time.sleep(POLL_S)
            if run.watcher.conflict is not None:
                raise Interrupted(run.watcher.conflict)
            if request is not None and request.signal and not is_passed_on:
                if not any(folder.logs.glob(folder.place("*").name)):
                    raise request.stopped(f"while no rank was running; resume with --resume {quote(str(folder.path))}")
                is_passed_on = True
                follower.screen.note(request.announcement)
                ray_worker.write_request(folder, request.for_ranks)
    return done.exception()


# --- in a worker of Ray ----------------------------------------------------------------------------------------------

_stores: list[Any] = []  # kept until this process ends: other ranks may end later


def _work(given: dict[str, Any]) -> None:
    """Start the rank of this worker, and wait for its end."""
    options: WorkerOptions = given["options"]
    context = train.get_context()
    rank, ranks, local_ranks = context.get_world_rank(), context.get_world_size(), context.get_local_world_size()
    rendezvous = None
    if rank == 0:
        ray_worker.begin_attempt(RunFolder(Path(options.run_dir)), ranks)
        store, rendezvous = serve_store(LOOPBACK if local_ranks == ranks else ray.util.get_node_ip_address())
        _stores.append(store)
    rendezvous = broadcast_from_rank_zero(rendezvous)
    # A rank with a single visible device calls it 0, and shares it with no other rank.
    place = (0, 1) if ray.get_gpu_ids() else (context.get_local_rank(), local_ranks)
    interface = network.variables_towards(rendezvous["MASTER_ADDR"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch logs errors for hosts without a name
    ray_worker.run_rank(options, rank, ranks, {**variables_of(rank, ranks, *place), **rendezvous, **interface})
