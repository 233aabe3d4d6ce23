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
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline import failure, hang, job, result, resume
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data import batches
from paceline.errors import ConfigError, Interrupted, RankFailed
from paceline.failure import Failure
from paceline.job import Task
from paceline.launch.environment import chosen_threads, usable_cores
from paceline.launch.restarts import Restarts
from paceline.result import Outcome
from paceline.run_folder import RunFolder, opened
from paceline.stop import SIGNALS
from paceline.telemetry.events import Events
from paceline.telemetry.follow import Follower
from paceline.world import pick_backend, pick_device

MAX_RESTARTS = 3  # of the managed loop; your own loop goes on from nothing
GRACE_S = 5  # between SIGTERM and SIGKILL for ranks whose neighbour has failed
RESEND_S = 1.0  # a rank that is still starting ignores a request to stop
AGENT_LOGGERS = ("torch.distributed.elastic", "torchelastic")
# The shell gives stdout and stderr one log, opened for appending, before Python starts.
SHELL = 'exec "$@" >>"$0" 2>&1'
# Idle OpenMP threads spin on their cores for milliseconds, which the threads that send gradients need: with several
# ranks, passive ones make a small step twice as fast (docs/benchmarks.md).
PASSIVE = 'export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"; '
# Ranks that save before they stop must not die of the request while they start: what is ignored stays so over exec.
DEAF = "trap '' TERM INT USR1; "


def start(config: Config, task: Task) -> Outcome:
    """Start the ranks, show what they do, and return when all are done. Raises RankFailed with the first failure."""
    began = time.time()
    past = resume.find(config)
    lanes = past.lanes(config)
    ranks = pick_ranks(config, lanes)
    # Sums inside an operator depend on its threads, so they follow the lanes, which belong to the run.
    threads = past.threads(config) or chosen_threads(lanes or ranks)
    config = config.model_copy(update={"threads": threads})
    if config.train_fn is None:
        config = config.model_copy(update={"lanes": lanes or ranks})
    # What would fail in every rank fails here, before a folder is made or a process started.
    pick_backend(config.backend, pick_device(config.device, 0), ranks)
    batches.lanes_of(0, ranks, config.lanes or ranks)
    packed = job.pack(config, task)
    with opened(config, past.run_dir) as folder:
        try:
            folder.job.unlink(missing_ok=True)  # of a launcher that was killed
            job.save(packed, folder.job)
            folder.forget_last_life()
        except OSError as error:
            with suppress(OSError):
                folder.job.unlink(missing_ok=True)
            raise ConfigError(
                f"run_dir={folder.path} cannot be written to: {error.strerror}; make room, or choose another folder"
            ) from None
        try:
            _run_to_end(config, folder, began)
        finally:
            with suppress(OSError):
                folder.job.unlink(missing_ok=True)  # it holds a copy of the data
        return result.collect(folder)


def pick_ranks(config: Config, lanes: int | None) -> int:
    """As many ranks as the config allows and the machine has room for, and as the lanes can be shared among."""
    if not config.ddp:
        return 1
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.procs_range is None:
        least, most = 1, gpus or 1
    else:
        least, most = config.procs_range
        if least < most:
            most = max(least, min(most, gpus or usable_cores()))
    fitting = [number for number in range(least, most + 1) if (lanes or number) % number == 0]
    return max(fitting, default=most)


def _run_to_end(config: Config, folder: RunFolder, began: float) -> None:
    """Start the ranks, and start them again from the last checkpoint as often as the config allows."""
    is_managed = config.train_fn is None
    limit = config.max_restarts if config.max_restarts is not None else MAX_RESTARTS if is_managed else 0
    restarts, store = Restarts(limit), Store(folder.checkpoints)
    request = Request() if is_managed else None
    news = ""
    while True:
        ranks = pick_ranks(config, config.lanes)
        first = _live(config, folder, ranks, began, request, news)
        if first is None:
            break
        if story := hang.explain(folder, ranks, config.hang_timeout_s):
            raise RankFailed(story)
        saved = store.newest_step()
        if (request is not None and request.signal) or not restarts.allow(first, saved):
            raise RankFailed(first.describe())
        news = (
            f"rank {first.rank} failed ({first.place}): {first.error}; starting again from "
            f"{f'step {saved}' if saved >= 0 else 'the beginning'} (restart {restarts.used} of {restarts.limit})"
        )
    if not (folder.result.exists() or folder.value.exists() or folder.stopped.exists()):
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {folder.log(0)}")


def _live(
    config: Config, folder: RunFolder, ranks: int, began: float, request: Request | None, news: str
) -> Failure | None:
    """One life of the ranks, shown on the screen; the first failure, if it ends with one."""
    folder.forget_last_life()
    shown = Follower(folder, ranks, from_now=True, board=config.log.tensorboard)
    with tempfile.TemporaryDirectory(prefix="paceline-") as private, shown:
        if news:
            with closing(Events(folder.events)) as events:
                events.write("restarted", text=news)
        if request is not None:
            request.say = shown.screen.note
        outcome = _run_agent(folder, ranks, _worker_command(folder, Path(private) / "store", began), request)
        if not outcome.is_failed():
            return None
        codes = {rank: process.exitcode for rank, process in outcome.failures.items()}
        return failure.first(folder, codes, spare=Path(private))


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


@dataclass
class Request:
    """What the launcher has been asked by signals, over all lives of the ranks."""

    signal: int = 0
    say: Callable[[str], None] = print


class Agent(LocalElasticAgent):  # type: ignore[misc]
    """torch's agent, which passes a first request to stop on to ranks that save, and waits less long for others."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, request: Request | None) -> None:
        super().__init__(spec, logs)
        self._request, self._sent_at = request, 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        close = self._pcontext.close
        # Ranks that take SIGTERM as a request would only wait for the neighbour that has failed.
        last = signal.SIGTERM if self._request is None else signal.SIGKILL
        self._pcontext.close = lambda death_sig=None, timeout=GRACE_S: close(last, min(timeout, GRACE_S))
        if self._request is not None and threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                signal.signal(name, self._on_signal)
        return pids

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        assert self._request is not None
        if self._request.signal:
            raise SignalException("asked again", signal.Signals(number))
        self._request.signal = number

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        request = self._request
        if request is not None and request.signal and time.monotonic() - self._sent_at > RESEND_S:
            if not self._sent_at:
                again = "Ctrl-C again" if request.signal == signal.SIGINT else "a second signal"
                request.say(f"{signal.Signals(request.signal).name}: saving and stopping; {again} ends at once")
            self._sent_at = time.monotonic()
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, request.signal)
        return super()._monitor_workers(worker_group)


def _worker_command(folder: RunFolder, store: Path, began: float) -> tuple[str, ...]:
    return (
        sys.executable, "-u", "-m", "paceline.worker", str(folder.job), str(store), str(os.getpid()), str(began)
    )  # fmt: skip


def _run_agent(folder: RunFolder, ranks: int, worker: tuple[str, ...], request: Request | None) -> RunResult:
    shell = (DEAF if request is not None else "") + (PASSIVE if ranks > 1 else "") + SHELL
    spec = WorkerSpec(
        role="paceline",
        local_world_size=ranks,
        rdzv_handler=LocalRendezvous(),
        entrypoint="/bin/sh",
        args=("-c", shell, str(folder.log("${local_rank}")), *worker),
        max_restarts=0,  # whether to start again is for `Restarts` to say
    )
    agent = Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), request)
    with _quiet_agent(), _kept_signal_handlers():
        try:
            return agent.run()
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt(f"the run folder is {folder.path}") from None
            raise Interrupted(f"ended by {stopped.sigval.name}; the run folder is {folder.path}") from None


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
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
