"""The worker of Ray that runs one rank: starts it, forwards requests to stop, and evaluates how it ends.

The workers and the launcher exchange requests and failures through the run folder, which all of them see.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RankFailed
from paceline.launch import processes
from paceline.launch.fork_server import POLL_S, RankSpec
from paceline.launch.processes import LocalRanks
from paceline.launch.restarts import Restarts, restart_report
from paceline.launch.stalls import StallDetector
from paceline.observe import failures
from paceline.observe.events import Events
from paceline.observe.failures import Failure
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt

FOLDER_S = 0.5  # between reads of the run folder, which may be on a slow network file system
ECHO_S = 2.0  # from the failure of a rank to the failures that it causes on other hosts
GRACE_S = 5.0


@dataclass(frozen=True)
class WorkerOptions:
    """The options that every worker of a run receives from the launcher."""

    run_dir: str
    working_folder: str  # of the ranks
    began: float
    can_save: bool  # the ranks save on a stop request
    hang_timeout_s: float


def begin_attempt(folder: RunFolder, ranks: int) -> None:
    """Report the end of the last attempt, and remove its files. Rank 0's worker, before any rank starts."""
    first = first_failure(folder, ranks)
    if first is not None:
        with closing(Events(folder.events)) as events:
            events.write("restarted", text=restart_report(first, folder))
    clear_last_attempt(folder)


def run_rank(options: WorkerOptions, rank: int, ranks: int, variables: dict[str, str]) -> None:
    """Start a rank and wait for its end. Raises RankFailed, after which Ray restarts all, only if that may help."""
    folder = RunFolder(Path(options.run_dir))
    spec = RankSpec(
        variables=variables,
        folder=options.working_folder,
        log=str(folder.log(rank)),
        arguments=(str(folder.job), "", str(options.began)),
        has_signals_ignored=options.can_save,
    )
    with processes.ranks(is_passive=ranks > 1) as started:
        started.start([spec])
        try:
            first = watch(started, folder, rank, StallDetector(folder, ranks, options.hang_timeout_s))
        finally:
            started.end(signal.SIGKILL, GRACE_S)
    if first is not None and Restarts(1).allow_in(folder, first):  # Ray counts the restarts
        raise RankFailed(first.describe())


def watch(started: LocalRanks, folder: RunFolder, rank: int, stalls: StallDetector) -> Failure | None:
    """Wait until the rank ends or another one fails; the first failure of all, if there is one."""
    read_at, ranks = 0.0, stalls.ranks
    while started.pids:
        started.poll(POLL_S)
        if stalls.check():
            stalls.report(started, rank)
        if time.monotonic() - read_at > FOLDER_S:
            read_at = time.monotonic()
            if number := read_request(folder):
                started.signal(number)
            if (first := first_failure(folder, ranks)) is not None and not first.is_echo:
                return first
    if not started.codes[0]:
        return None
    if not folder.failure(rank).exists():  # it was killed
        failures.write(failures.first(folder, {rank: started.codes[0]}), folder)
    quiet_at = time.monotonic() + ECHO_S
    while ((first := first_failure(folder, ranks)) is None or first.is_echo) and time.monotonic() < quiet_at:
        time.sleep(POLL_S)
    return first


def first_failure(folder: RunFolder, ranks: int) -> Failure | None:
    """The first of the failures that ranks have written, which caused the others."""
    with suppress(FileNotFoundError):  # removed in the meantime
        if written := failures.read(folder, range(ranks)):
            return failures.first(folder, dict.fromkeys(written, 1))
    return None


# --- requests to stop ----------------------------------------------------------------------------------------------


def write_request(folder: RunFolder, number: int) -> None:
    """Make the workers send a signal to their ranks; 0 for none."""
    folder.request.write_text(str(number), encoding="utf-8")  # not a new file: NFS shows a change sooner


def read_request(folder: RunFolder) -> int:
    """The signal to send to the ranks, 0 for none."""
    with suppress(OSError, ValueError):  # ValueError: it is being written
        return int(folder.request.read_text(encoding="utf-8"))
    return 0
