"""A run through Ray Train: on the cluster that Ray knows of, or on one of its own.

Ray places the workers and starts all of them again after a failure. A worker carries one rank, an ordinary process of
Paceline's (`launch/carrier.py`), which finds the last checkpoint by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import ray
from ray import train
from ray.exceptions import RayError
from ray.train.backend import BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer

from paceline.checkpoint import resume
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data import batches
from paceline.errors import ConfigError, Interrupted, RankFailed
from paceline.launch import network, ray_worker
from paceline.launch.fork_server import LOOK_S
from paceline.launch.local import BEFORE, StopRequest, failure_told, hearing, laid_out, limit_of
from paceline.launch.machines import fitting, room_among, serve_store, variables_of
from paceline.launch.ray_worker import Orders
from paceline.launch.relocation import FolderWatcher, loss_of
from paceline.observe import hangs
from paceline.observe.screen.follower import Follower
from paceline.observe.sinks.supervisor import running_sinks
from paceline.run import job
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from paceline.run.outcome import Outcome, collect
from paceline.system.cores import chosen_threads
from paceline.worker.main import train as training

LOOPBACK = "127.0.0.1"


class Cluster(NamedTuple):
    """What Ray has for the ranks."""

    gpus: int
    cpus: int
    nodes: int

    def share(self, ranks: int, device: str) -> dict[str, float]:
        """What one of so many ranks asks for: a GPU where there are any, and a CPU, or an equal part of all."""
        share = {"CPU": min(1.0, self.cpus / ranks) or 1.0}
        return {**share, "GPU": 1.0} if device == "cuda" or (device == "auto" and self.gpus) else share

    def lacks(self, ranks: int, share: dict[str, float]) -> bool:
        """Whether the ranks must wait until the cluster grows."""
        return ranks * share.get("GPU", 0) > self.gpus or ranks * share["CPU"] > self.cpus


class NoGroup(BackendConfig):  # type: ignore[misc]
    """Ray Train makes no process group, for its workers only carry the ranks, who make their own."""

    backend = "none"


def start(config: Config, task: Task) -> Outcome:
    """Have Ray start the ranks, show what they do, and return when all are done."""
    request = StopRequest()
    with hearing(request, "nothing was running"):
        return _start(config, task, request)


def _start(config: Config, task: Task, request: StopRequest) -> Outcome:
    began = time.time()
    past = resume.find_restore_point(config)
    lanes = past.lanes(config)
    with cluster(config.device) as there:
        ranks = fitting(*room_among(config, there.gpus, there.cpus), lanes)
        # Sums inside an operator depend on its threads, so they follow the lanes, which belong to the run.
        threads = past.threads(config) or chosen_threads(-(-(lanes or ranks) // there.nodes))
        config = config.model_copy(update={"threads": threads})
        if config.train_fn is None:
            config = config.model_copy(update={"lanes": lanes or ranks})
        batches.lanes_of(0, ranks, config.lanes or ranks)
        packed = job.pack(config, task)
        with open_run(config, past.run_dir) as folder, FolderWatcher(folder, config) as keeper:
            is_managed = task is training and config.train_fn is None
            orders = Orders(str(folder.path), str(Path.cwd()), began, is_managed, config.hang_timeout_s)
            told = failure_told(folder)
            with laid_out(packed, folder), running_sinks(config.log.trackers, folder), told, _fresh(folder):
                if request.signal:
                    raise request.stopped(BEFORE)
                trainer = _trainer(config, folder, orders, ranks, there.share(ranks, config.device))
                _run_to_end(config, folder, keeper, trainer, ranks, there, request if is_managed else None)
            return collect(folder)


@contextmanager
def cluster(device: str) -> Iterator[Cluster]:
    """The cluster of RAY_ADDRESS, or that of `ray start` here, or one that is started now and ends with the run."""
    is_ours = not ray.is_initialized()
    before = signal.getsignal(signal.SIGTERM)
    if is_ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the one that says nothing when it is told to
        address = os.environ.get("RAY_ADDRESS", "")
        try:
            if why := network.why_unreachable(address):  # Ray would try for minutes
                raise ConnectionError(why)
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, RayError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not address:
                raise ConfigError(f"launcher=ray cannot start a cluster here: {why}; see `ray start --head`") from error
            raise ConfigError(f"RAY_ADDRESS={address} cannot be used: {why}; correct it, or unset it") from error
        if threading.current_thread() is threading.main_thread():  # Ray has set a handler of its own
            signal.signal(signal.SIGTERM, before)
    try:
        has = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        yield Cluster(int(has.get("GPU", 0)) if device != "cpu" else 0, int(has.get("CPU", 0)), max(1, nodes))
    finally:
        if is_ours:
            ray.shutdown()


@contextmanager
def _fresh(folder: RunFolder) -> Iterator[None]:
    """Nobody has asked for anything yet; what is only for the time of the run goes with it."""
    ray_worker.ask(folder, 0)
    try:
        yield
    finally:
        folder.request.unlink(missing_ok=True)
        shutil.rmtree(folder.ray, ignore_errors=True)


def _trainer(config: Config, folder: RunFolder, orders: Orders, ranks: int, share: dict[str, float]) -> TorchTrainer:
    """Ray Train's part: the workers, where they are, how often they may fail."""
    return TorchTrainer(
        _work,
        train_loop_config={"orders": orders},
        torch_config=NoGroup(),
        scaling_config=train.ScalingConfig(num_workers=ranks, use_gpu="GPU" in share, resources_per_worker=share),
        run_config=train.RunConfig(
            name="train",
            storage_path=str(folder.ray),
            failure_config=train.FailureConfig(max_failures=limit_of(config, orders.is_managed)),
            logging_config=train.LoggingConfig(log_level="ERROR"),
        ),
    )


def _run_to_end(
    config: Config, folder: RunFolder, keeper: FolderWatcher, trainer: TorchTrainer, ranks: int, there: Cluster,
    request: StopRequest | None,
) -> None:  # fmt: skip
    """Train, and show it; pass a request to stop on. Raises RankFailed if Ray has given up, or the ranks have."""
    with (
        Follower(folder, ranks, from_now=True, tensorboard=config.log.tensorboard) as shown,
        hearing(request, f"the run folder is {folder.path}"),
    ):
        if there.lacks(ranks, there.share(ranks, config.device)):
            shown.screen.note(f"the Ray cluster has no room for {ranks} ranks; waiting until it grows")
        done = in_thread(trainer.fit)
        is_passed_on = False
        while not done.done():
            time.sleep(LOOK_S)
            if keeper.conflict is not None:
                raise Interrupted(keeper.conflict)
            if request is not None and request.signal and not is_passed_on:
                if not any(folder.logs.glob(folder.place("*").name)):
                    raise request.stopped(f"while no rank was there; resume with --resume {quote(str(folder.path))}")
                is_passed_on, request.say = True, shown.screen.note
                request.answer()
                ray_worker.ask(folder, request.signal)
    error, first = done.exception(), ray_worker.first_failure(folder, ranks)
    if error is not None or first is not None:
        keeper.look()
        if first is None:
            raise RankFailed(f"Ray has given up: {error}")
        first = hangs.explain(first, folder, ranks)
        if loss := loss_of(folder, Store(folder.checkpoints).newest_step()):
            raise RankFailed(f"{first.describe()}\n{loss}")
        raise first.to_error()
    if not folder.has_ending():
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {folder.log(0)}")


def in_thread(function: Callable[[], Any]) -> Future[None]:
    """Call something beside this thread, which stays free for signals, and whose end does not wait for it."""
    done: Future[None] = Future()

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - it is told to whoever waits
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=call, name="paceline-ray", daemon=True).start()
    return done


# --- in a worker of Ray ----------------------------------------------------------------------------------------------

_served: list[Any] = []  # stores, for as long as this process lives: other ranks may end later


def _work(given: dict[str, Any]) -> None:
    """Carry the rank that Ray gives to this worker."""
    orders: Orders = given["orders"]
    context = train.get_context()
    rank, ranks, near = context.get_world_rank(), context.get_world_size(), context.get_local_world_size()
    meeting = None
    if rank == 0:
        ray_worker.begin_life(RunFolder(Path(orders.run_dir)), ranks)
        store, meeting = serve_store(LOOPBACK if near == ranks else ray.util.get_node_ip_address())
        _served.append(store)
    meeting = broadcast_from_rank_zero(meeting)
    # A rank that sees a single device calls it 0, and shares it with nobody.
    place = (0, 1) if ray.get_gpu_ids() else (context.get_local_rank(), near)
    interface = network.variables_towards(meeting["MASTER_ADDR"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch complains of hosts without a name
    ray_worker.carry(orders, rank, ranks, {**variables_of(rank, ranks, *place), **meeting, **interface})
