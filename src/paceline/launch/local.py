"""Starts the ranks of a run at a site, watches them until all have ended, and starts them again after a failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import FrameType

from paceline.checkpoint import resume
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data import batches
from paceline.errors import ConfigError, Interrupted, RankFailed, Stopped
from paceline.launch.fork_server import LOOK_S, RankSpec
from paceline.launch.machines import LocalMachine, Machines, RankGroup, Rendezvous
from paceline.launch.relocation import FolderWatcher, loss_of
from paceline.launch.restarts import Restarts, restarted_line
from paceline.launch.stalls import StallDetector
from paceline.observe import failures, hangs
from paceline.observe.events import Events
from paceline.observe.failures import Failure
from paceline.observe.screen.follower import Follower
from paceline.observe.sinks.supervisor import running_sinks
from paceline.observe.tail import NO_FILE, identity_of
from paceline.run import job
from paceline.run.job import Job, Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt, keep_hang_report, open_run
from paceline.run.outcome import Outcome, collect
from paceline.system.cores import chosen_threads
from paceline.system.signals import SIGNALS, handled, heeded
from paceline.worker.main import train
from paceline.world import pick_backend, pick_device

MAX_RESTARTS = 3  # of the managed loop; your own loop goes on from nothing
GRACE_S = 5  # between SIGTERM and SIGKILL for ranks whose neighbour has failed
ECHO_S = 1.0  # between a rank that has failed and what its neighbours see of it, on a busy machine
BEFORE = "before it began"
RESEND_S = 1.0  # a rank that is still starting ignores a request to stop


def start(config: Config, task: Task, site: Machines | None = None) -> Outcome:
    """Start the ranks, show what they do, and return when all are done. Raises RankFailed with the first failure."""
    request = StopRequest()
    with hearing(request, "nothing was running"):
        return _start(config, task, site or LocalMachine(config), request)


def _start(config: Config, task: Task, site: Machines, request: StopRequest) -> Outcome:
    began = time.time()
    past = resume.find_restore_point(config)
    _gather(site, request, BEFORE)
    lanes = past.lanes(config)
    ranks = site.ranks_for(lanes)
    # Sums inside an operator depend on its threads, so they follow the lanes, which belong to the run.
    threads = past.threads(config) or chosen_threads(site.shares_of(lanes or ranks))
    config = config.model_copy(update={"threads": threads})
    if config.train_fn is None:
        config = config.model_copy(update={"lanes": lanes or site.lanes_for(ranks)})
    # What would fail in every rank fails here, before a folder is made or a process started.
    pick_backend(config.backend, pick_device(config.device, 0), site.shares_of(ranks))
    batches.lanes_of(0, ranks, config.lanes or ranks)
    packed = job.pack(config, task)
    with open_run(config, past.run_dir) as folder, FolderWatcher(folder, config) as keeper:
        with laid_out(packed, folder), running_sinks(config.log.trackers, folder), failure_told(folder):
            if request.signal:
                raise request.stopped(BEFORE)
            is_managed = task is train and config.train_fn is None
            _run_to_end(config, site, folder, keeper, began, request if is_managed else None)
        return collect(folder)


@contextmanager
def laid_out(packed: Job, folder: RunFolder) -> Iterator[None]:
    """The job lies in the run folder inside, and nothing of an earlier life does when it begins."""
    try:
        folder.job.unlink(missing_ok=True)  # of a launcher that was killed
        job.save(packed, folder.job)
        clear_last_attempt(folder)
    except OSError as error:
        with suppress(OSError):
            folder.job.unlink(missing_ok=True)
        raise ConfigError(
            f"run_dir={folder.path} cannot be written to: {error.strerror}; make room, or choose another folder"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            folder.job.unlink(missing_ok=True)  # it holds a copy of the data


@contextmanager
def failure_told(folder: RunFolder) -> Iterator[None]:
    """Write an event if the run fails inside; not if it was refused before it changed the folder of an earlier one."""
    before = identity_of(folder.events)
    try:
        yield
    except (ConfigError, RankFailed) as error:
        if identity_of(folder.events) != before or before == NO_FILE:
            with closing(Events(folder.events)) as events:
                events.write("run_failed", text=str(error))
        raise


def _run_to_end(
    config: Config, site: Machines, folder: RunFolder, keeper: FolderWatcher, began: float, request: StopRequest | None
) -> None:
    """Start the ranks, and start them again from the last checkpoint as often as the config allows.

    The managed loop is asked to save and stop; anything else has no `request` and is ended by a signal at once.
    """
    limit = limit_of(config, is_managed=request is not None)
    restarts, store = Restarts(limit), Store(folder.checkpoints)
    news = ""
    while True:
        _gather(site, request, f"while no rank was there; resume with --resume {quote(str(folder.path))}")
        ranks = site.ranks_for(config.lanes)
        first = _live(config, site, folder, keeper, ranks, began, request, news)
        if request is not None and request.is_for_growth:
            request.signal, request.is_for_growth = 0, False
            if first is None and folder.stopped.exists():
                news = "there is room for more ranks; starting again with them"
                continue
        if first is None:
            break
        keeper.look()
        first, saved = hangs.explain(first, folder, ranks), store.newest_step()
        if loss := loss_of(folder, saved):
            raise RankFailed(f"{first.describe()}\n{loss}")
        if (request is not None and request.signal) or not restarts.allow(first, saved):
            raise first.to_error()
        news = f"{restarted_line(first, saved)} (restart {restarts.used} of {restarts.limit})"
        if (table := keep_hang_report(folder)) is not None:
            news += f"; all ranks are in {table}"
    if not folder.has_ending():
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {folder.log(0)}")


def _gather(site: Machines, request: StopRequest | None, when: str) -> None:
    """Wait for room at a site. A request to stop has nothing to wait for then: whatever there is, is saved."""
    with hearing(request, "nothing was running"):
        site.gather(lambda: request is not None and request.signal != 0)
    if request is not None and request.signal:
        raise request.stopped(when)


def _live(
    config: Config, site: Machines, folder: RunFolder, keeper: FolderWatcher, ranks: int, began: float,
    request: StopRequest | None, news: str,
) -> Failure | None:  # fmt: skip
    """One life of the ranks, shown on the screen; the first failure, if it ends with one."""
    clear_last_attempt(folder)
    shown = Follower(folder, ranks, from_now=True, tensorboard=config.log.tensorboard)
    with site.meeting(ranks) as meeting, shown:
        if news:
            with closing(Events(folder.events)) as events:
                events.write("restarted", text=news)
        if request is not None:
            request.say = shown.screen.note
        births = _births(folder, meeting, began, is_deaf=request is not None)
        with site.ranks() as started, hearing(request, f"the run folder is {folder.path}"):
            started.start(births)
            silence = StallDetector(folder, ranks, config.hang_timeout_s)
            codes = _watch(started, request, silence, keeper, lambda: site.is_outgrown(ranks, config.lanes))
        has_failed = any(codes.values()) or folder.hang.exists()
        return failures.first(folder, codes, meeting.spare) if has_failed else None


def limit_of(config: Config, is_managed: bool) -> int:
    """How often the ranks may start again without progress."""
    return config.max_restarts if config.max_restarts is not None else MAX_RESTARTS if is_managed else 0


@dataclass
class StopRequest:
    """What the launcher has been asked by signals, over all lives of the ranks."""

    signal: int = 0
    is_for_growth: bool = False  # nobody has asked; the ranks are to stop only to be more
    say: Callable[[str], None] = print

    def stopped(self, when: str) -> Stopped:
        """The error for a request that came while no rank was there."""
        return Stopped(f"stopped by {signal.Signals(self.signal).name} {when}")

    def answer(self) -> None:
        """Say what is done about it."""
        again = "Ctrl-C again" if self.signal == signal.SIGINT else "a second signal"
        self.say(f"{signal.Signals(self.signal).name}: saving and stopping; {again} ends at once")


def _births(folder: RunFolder, meeting: Rendezvous, began: float, *, is_deaf: bool) -> list[RankSpec]:
    """The ranks of one life."""
    common = {"folder": str(Path.cwd()), "arguments": (str(folder.job), meeting.store, str(began)), "is_deaf": is_deaf}
    return [
        RankSpec(variables=variables, log=str(folder.log(rank)), **common)  # type: ignore[arg-type]
        for rank, variables in enumerate(meeting.variables)
    ]


def _watch(
    ranks: RankGroup,
    request: StopRequest | None,
    silence: StallDetector,
    keeper: FolderWatcher,
    is_outgrown: Callable[[], bool],
) -> dict[int, int]:
    """Wait for the ranks. When one fails, end the others. The exit codes, 0 for those that were ended here."""
    passed_on = 0.0
    try:
        while ranks.pids and not any(ranks.codes.values()):
            ranks.look(LOOK_S)
            if keeper.conflict is not None:  # no event is written: the path leads to another folder
                raise Interrupted(keeper.conflict)
            if silence.is_hang():
                silence.report(ranks)
                break
            if request is not None and not request.signal and is_outgrown():
                request.signal, request.is_for_growth = signal.SIGTERM, True
            if request is not None and request.signal and time.monotonic() - passed_on > RESEND_S:
                if not passed_on and not request.is_for_growth:
                    request.answer()
                passed_on = time.monotonic()
                ranks.signal(request.signal)
        # The death of one rank makes others fail, and the news of both come in any order.
        quiet_at = time.monotonic() + ECHO_S
        while ranks.pids and time.monotonic() < quiet_at:
            ranks.look(LOOK_S)
        return dict.fromkeys(ranks.pids, 0) | ranks.codes
    finally:
        # Ranks that take SIGTERM as a request would only wait for the neighbour that has failed.
        ranks.end(signal.SIGTERM if request is None else signal.SIGKILL, GRACE_S)


@contextmanager
def hearing(request: StopRequest | None, news: str) -> Iterator[None]:
    """Take signals as requests, the first time; otherwise as the end of the run. Outside, they are as before."""

    def hear(number: int, frame: FrameType | None) -> None:
        is_asked = request is not None and bool(request.signal) and not request.is_for_growth
        if request is not None and number == signal.SIGHUP:
            # The terminal is gone, which is told more than once. Ranks are asked in a way that nohup does not hide.
            request.signal, request.is_for_growth = request.signal if is_asked else signal.SIGTERM, False
        elif request is not None and not is_asked and number in SIGNALS:
            request.signal, request.is_for_growth = number, False
        elif number == signal.SIGINT:
            raise KeyboardInterrupt(news)
        else:
            raise Interrupted(f"ended by {signal.Signals(number).name}; {news}")

    # What a program does with SIGUSR1 is its own affair, unless its ranks save when they get it.
    names = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    names += [signal.SIGUSR1] if request is not None else []
    with handled(heeded(names), hear):
        yield
