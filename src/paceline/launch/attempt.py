"""One attempt of a run: starts its ranks, watches them until all have ended, and ends them when one fails."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.config import Config
from paceline.errors import Interrupted
from paceline.launch.fork_server import POLL_S, RankSpec
from paceline.launch.machines import Machines, RankGroup, Rendezvous, StopSender
from paceline.launch.relocation import FolderWatcher
from paceline.launch.stalls import StallDetector
from paceline.observe import failures
from paceline.observe.events import Events
from paceline.observe.failures import Failure
from paceline.observe.screen.console import Screen
from paceline.observe.screen.follower import Follower
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt
from paceline.system.signals import StopRequest, listening

GRACE_S = 5  # between SIGTERM and SIGKILL, for the other ranks after a failure
SECONDARY_FAILURE_S = 1.0  # from the failure of a rank to the failures that it causes in others, on a busy machine


@dataclass(frozen=True)
class Launch:
    """The settings that all attempts of a run share."""

    config: Config
    machines: Machines
    folder: RunFolder
    watcher: FolderWatcher
    began: float
    request: StopRequest | None  # None for ranks that cannot save on a stop request


class AttemptEnd(NamedTuple):
    """The end of an attempt."""

    failure: Failure | None  # the first one
    is_growing: bool  # the ranks have saved and stopped in order to restart with more ranks


def run_attempt(launch: Launch, ranks: int, report: str) -> AttemptEnd:
    """Start the ranks and show their progress until all have ended; `report` is the reason for another attempt."""
    config, folder = launch.config, launch.folder
    clear_last_attempt(folder)
    follower = Follower(folder, ranks, from_now=True, tensorboard=config.log.tensorboard)
    with launch.machines.rendezvous(ranks) as rendezvous, follower:
        if report:
            with closing(Events(folder.events)) as events:
                events.write("restarted", text=report)
        specs = _rank_specs(launch, rendezvous)
        with launch.machines.rank_group() as group, listening(launch.request, f"the run folder is {folder.path}"):
            group.start(specs)
            codes, is_growing = _watch(launch, group, ranks, follower.screen)
        has_failed = any(codes.values()) or folder.hang.exists()
        failure = failures.first(folder, codes, rendezvous.spare) if has_failed else None
    return AttemptEnd(failure, is_growing and failure is None and folder.stopped.exists())


def _rank_specs(launch: Launch, rendezvous: Rendezvous) -> list[RankSpec]:
    """The arguments with which each rank of an attempt is started."""
    return [
        RankSpec(
            variables=variables,
            folder=str(Path.cwd()),
            log=str(launch.folder.log(rank)),
            arguments=(str(launch.folder.job), rendezvous.store, str(launch.began)),
            has_signals_ignored=launch.request is not None,
        )
        for rank, variables in enumerate(rendezvous.variables)
    ]


def _watch(launch: Launch, group: RankGroup, ranks: int, screen: Screen) -> tuple[dict[int, int], bool]:
    """Wait for the ranks; when one fails, end the others. Returns their exit codes, 0 for ranks that are ended here.

    Also returns whether the ranks were stopped because more ranks can run now.
    """
    request, sender, is_growing = launch.request, StopSender(group), False
    stalls = StallDetector(launch.folder, ranks, launch.config.hang_timeout_s)
    try:
        while group.pids and not any(group.codes.values()):
            group.poll(POLL_S)
            if launch.watcher.conflict is not None:  # no event is written: the path now refers to another folder
                raise Interrupted(launch.watcher.conflict)
            if stalls.check():
                stalls.report(group)
                break
            if request is None:
                continue
            if not request.signal and not is_growing:
                is_growing = launch.machines.has_capacity_beyond(ranks, launch.config.lanes)
            if sender.send(request.for_ranks or (signal.SIGTERM if is_growing else 0)) and request.signal:
                screen.note(request.announcement)
        # The failure of one rank makes others fail, and their exit codes arrive in any order.
        deadline = time.monotonic() + SECONDARY_FAILURE_S
        while group.pids and time.monotonic() < deadline:
            group.poll(POLL_S)
        return dict.fromkeys(group.pids, 0) | group.codes, is_growing and request is not None and not request.signal
    finally:
        # Ranks for which SIGTERM is a request to save would wait for the rank that has failed.
        group.end(signal.SIGTERM if request is None else signal.SIGKILL, GRACE_S)
