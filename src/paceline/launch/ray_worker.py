"""A process of somebody else's cluster that carries one rank: starts it, passes requests on, and judges how it ends.

What carriers must know of each other and of the launcher lies in the run folder, which all of them see.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.store import Store
from paceline.errors import RankFailed
from paceline.launch import processes as processes
from paceline.launch.fork_server import LOOK_S, RankSpec
from paceline.launch.processes import LocalRanks
from paceline.launch.relocation import loss_of
from paceline.launch.restarts import Restarts, restarted_line
from paceline.launch.stalls import StallDetector
from paceline.observe import failures
from paceline.observe.events import Events
from paceline.observe.failures import Failure
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt, keep_hang_report

NOTICE_S = 0.5  # between looks into the run folder, which may be far away
ECHO_S = 2.0  # between a rank that has failed and what carriers elsewhere see of it
GRACE_S = 5.0


@dataclass(frozen=True)
class Orders:
    """What every carrier of a run is told."""

    run_dir: str
    workplace: str  # the working folder of the ranks
    began: float
    is_managed: bool  # the ranks save when they are asked to stop
    hang_timeout_s: float


def begin_life(folder: RunFolder, ranks: int) -> None:
    """Say what has ended the last life, and forget it. Rank 0's carrier, before any rank is there."""
    first = first_failure(folder, ranks)
    if first is not None:
        text = restarted_line(first, Store(folder.checkpoints).newest_step())
        if (table := keep_hang_report(folder)) is not None:
            text += f"; all ranks are in {table}"
        with closing(Events(folder.events)) as events:
            events.write("restarted", text=text)
    clear_last_attempt(folder)


def carry(orders: Orders, rank: int, ranks: int, variables: dict[str, str]) -> None:
    """Start a rank and wait for its end. Raises RankFailed only if it is worth while to start all of them again."""
    folder = RunFolder(Path(orders.run_dir))
    birth = RankSpec(
        variables=variables,
        folder=orders.workplace,
        log=str(folder.log(rank)),
        arguments=(str(folder.job), "", str(orders.began)),
        is_deaf=orders.is_managed,
    )
    with processes.ranks(is_passive=ranks > 1) as started:
        started.start([birth])
        try:
            first = _watch(started, folder, rank, StallDetector(folder, ranks, orders.hang_timeout_s))
        finally:
            started.end(signal.SIGKILL, GRACE_S)
    if first is not None and is_worth_another_try(folder, first):
        raise RankFailed(first.describe())


def _watch(started: LocalRanks, folder: RunFolder, rank: int, silence: StallDetector) -> Failure | None:
    """Wait for the rank, or for another one to fail; the first failure of all, if there is one."""
    looked, ranks = 0.0, silence.ranks
    while started.pids:
        started.look(LOOK_S)
        if silence.is_hang():
            silence.report(started, rank)
        if time.monotonic() - looked > NOTICE_S:
            looked = time.monotonic()
            if number := asked(folder):
                started.signal(number)
            if (first := first_failure(folder, ranks)) is not None and not first.is_echo:
                return first
    if not started.codes[0]:
        return None
    if not folder.failure(rank).exists():  # it was killed
        failures.write(failures.first(folder, {rank: started.codes[0]}), folder)
    quiet_at = time.monotonic() + ECHO_S
    while ((first := first_failure(folder, ranks)) is None or first.is_echo) and time.monotonic() < quiet_at:
        time.sleep(LOOK_S)
    return first


def first_failure(folder: RunFolder, ranks: int) -> Failure | None:
    """The failure that came first and caused the others, of those that have been written down."""
    with suppress(FileNotFoundError):  # forgotten meanwhile
        if told := failures.read(folder, range(ranks)):
            return failures.first(folder, dict.fromkeys(told, 1))
    return None


def is_worth_another_try(folder: RunFolder, first: Failure) -> bool:
    """Whether a failure may not come again; how often is counted by others."""
    saved = Store(folder.checkpoints).newest_step()
    return loss_of(folder, saved) is None and Restarts(1).allow(first, saved)


# --- requests to stop ----------------------------------------------------------------------------------------------


def ask(folder: RunFolder, number: int) -> None:
    """Have the carriers send a signal to their ranks; 0 for none."""
    folder.request.write_text(str(number), encoding="utf-8")  # in its place: NFS sees that sooner than a new file


def asked(folder: RunFolder) -> int:
    """The signal that is asked for, if there is one."""
    with suppress(OSError, ValueError):  # ValueError: it is being written
        return int(folder.request.read_text(encoding="utf-8"))
    return 0
