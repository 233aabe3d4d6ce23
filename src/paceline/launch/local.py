"""The ranks of one machine, as children of torch's elastic agent.

Nothing can connect from outside: the agent keeps its store in memory, the ranks meet in a file of a private folder,
and Gloo and NCCL listen on loopback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline import failure, job, result
from paceline.config import Config
from paceline.data import batches
from paceline.errors import RankFailed, Stopped
from paceline.job import Task
from paceline.launch.environment import chosen_threads
from paceline.result import Outcome
from paceline.run_folder import RunFolder
from paceline.telemetry.follow import Follower
from paceline.world import pick_backend, pick_device

GRACE_S = 5  # between SIGTERM and SIGKILL for ranks whose neighbour has failed
AGENT_LOGGERS = ("torch.distributed.elastic", "torchelastic")
# The shell gives stdout and stderr one log, opened for appending, before Python starts.
SHELL = 'exec "$@" >>"$0" 2>&1'
# Idle OpenMP threads spin on their cores for milliseconds, which the threads that send gradients need: with several
# ranks, passive ones make a small step twice as fast (docs/benchmarks.md).
SHELL_OF_SEVERAL = 'export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"; ' + SHELL


def start(config: Config, task: Task) -> Outcome:
    """Start the ranks, show what they do, and return when all are done. Raises RankFailed with the first failure."""
    ranks = config.procs or (torch.cuda.device_count() if config.device != "cpu" and config.ddp else 0) or 1
    # Sums inside an operator depend on its threads, so they follow the lanes, which belong to the run.
    threads = config.threads or chosen_threads(config.lanes or ranks)
    config = config.model_copy(update={"procs": ranks, "threads": threads})
    # What would fail in every rank fails here, before a folder is made or a process started.
    pick_backend(config.backend, pick_device(config.device, 0), ranks)
    batches.lanes_of(0, ranks, config.lanes or ranks)
    packed = job.pack(config, task)
    folder = RunFolder.create(config)
    job.save(packed, folder.job)
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-") as private, Follower(folder, ranks):
            outcome = _run_agent(folder, ranks, store=Path(private) / "store")
    finally:
        folder.job.unlink(missing_ok=True)  # it holds a copy of the data
    if outcome.is_failed():
        codes = {rank: process.exitcode for rank, process in outcome.failures.items()}
        raise RankFailed(failure.first(folder, codes).describe())
    if not (folder.result.exists() or folder.value.exists()):
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {folder.log(0)}")
    return result.collect(folder)


class LocalRendezvous(RendezvousHandler):  # type: ignore[misc]
    """The meeting of a single agent with itself: no port, no file, nothing to wait for."""

    use_agent_store = False

    def next_rendezvous(self) -> RendezvousInfo:
        """A world of one agent."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def get_backend(self) -> str:
        return "local"

    def get_run_id(self) -> str:
        return "paceline"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):  # type: ignore[misc]
    """torch's agent, with a shorter wait for survivors: its own half a minute is for clusters."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        close = self._pcontext.close
        self._pcontext.close = lambda death_sig=None, timeout=GRACE_S: close(death_sig, min(timeout, GRACE_S))
        return pids


def _run_agent(folder: RunFolder, ranks: int, store: Path) -> RunResult:
    worker = (sys.executable, "-u", "-m", "paceline.worker", str(folder.job), str(store), str(os.getpid()))
    spec = WorkerSpec(
        role="paceline",
        local_world_size=ranks,
        rdzv_handler=LocalRendezvous(),
        entrypoint="/bin/sh",
        args=("-c", SHELL if ranks == 1 else SHELL_OF_SEVERAL, str(folder.log("${local_rank}")), *worker),
        max_restarts=0,
    )
    agent = Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))
    with _quiet_agent(), _kept_signal_handlers():
        try:
            return agent.run()
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt(f"the run folder is {folder.path}") from None
            raise Stopped(f"stopped by {stopped.sigval.name}; the run folder is {folder.path}") from None


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's own log lines tell less than ours; keep them off the screen."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(AGENT_LOGGERS)]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """The agent takes over signal handlers and leaves them so; a notebook wants its Ctrl-C back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
