"""The launcher that starts the ranks itself, on this machine or on several, and restarts them after a failure.

One attempt, from the start of its ranks to their end, is in `attempt.py`; the rules of restarts are in `restarts.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from paceline.checkpoint import resume
from paceline.config import Config
from paceline.errors import RankFailed
from paceline.launch import kubernetes
from paceline.launch.attempt import Launch, run_attempt
from paceline.launch.environment import report_shared_cores
from paceline.launch.machines import LocalMachine, Machines
from paceline.launch.relocation import FolderWatcher
from paceline.launch.restarts import Restarts, final_error, limit_of, restart_report
from paceline.launch.setup import TRAIN, can_save, report_new_run, staged, with_lanes_and_threads, with_mirror
from paceline.observe import hangs
from paceline.run import job
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from paceline.run.lock import RunIsLocked
from paceline.run.outcome import Outcome, collect
from paceline.system.cores import usable_cores
from paceline.system.signals import StopRequest, listening, requests_deferred
from paceline.world import pick_backend, pick_device

NOTHING_RAN = "nothing was running"


def start(config: Config, task: Task) -> Outcome:
    """Start the ranks on this machine, or with a `rendezvous` on several; return when all have ended."""
    if task == TRAIN and (outcome := kubernetes.finished(config)) is not None:
        return outcome
    if config.rendezvous is None:
        return start_on(LocalMachine(config), config, task)
    with requests_deferred():
        from paceline.launch.cluster import roles
    return roles.start(config, task)


def start_on(machines: Machines, config: Config, task: Task) -> Outcome:
    """Start the ranks, show their progress, return when all have ended. Raises RankFailed with the first failure."""
    config = with_mirror(config, task)
    request = StopRequest()
    with listening(request, NOTHING_RAN):
        began = time.time()
        restore_point = resume.find_restore_point(config)
        if can_save(config, task):
            report_new_run(config, restore_point)
        _gather(machines, request, "before it started")
        ranks = machines.ranks_for(restore_point.lanes(config))
        device = pick_device(config.device, 0)
        if device.type == "cpu":
            report_shared_cores(machines.ranks_per_machine(ranks), usable_cores())
        # Errors that every rank would raise are raised here, before a folder is created or a process started.
        pick_backend(config.backend, device, machines.ranks_per_machine(ranks))
        config = with_lanes_and_threads(
            config, restore_point, ranks, machines.lanes_for(ranks), machines.ranks_per_machine
        )
        packed = job.pack(config, task)
        with _opened(config, restore_point.run_dir) as folder, FolderWatcher(folder, config) as watcher:
            with staged(packed, folder, config):
                if request.signal:
                    raise request.stopped("before it started")
                # The managed loop saves and stops on a signal; any other task is ended by it immediately.
                stop_request = request if can_save(config, task) else None
                _run_attempts(Launch(config, machines, folder, watcher, began, stop_request))
            return collect(folder)


@contextmanager
def _opened(config: Config, run_dir: Path | None) -> Iterator[RunFolder]:
    """The folder of the run, locked inside."""
    try:
        with open_run(config, run_dir) as folder:
            yield folder
    except RunIsLocked as error:  # an NFS server frees the lock of a lost host after a minute or two
        raise kubernetes.retried(error) from None


def _run_attempts(launch: Launch) -> None:
    """Start the ranks, and restart them from the last checkpoint as often as the rules allow."""
    folder, request = launch.folder, launch.request
    restarts = Restarts(limit_of(launch.config, can_save=request is not None))
    report = ""
    while True:
        _gather(launch.machines, request, f"while no rank was running; resume with --resume {quote(str(folder.path))}")
        ranks = launch.machines.ranks_for(launch.config.lanes)
        failure, is_growing = run_attempt(launch, ranks, report)
        if is_growing:
            report = "capacity for more ranks is available; restarting with more ranks"
            continue
        if failure is None:
            break
        launch.watcher.check()
        failure = hangs.explain(failure, folder, ranks)
        is_stopping = request is not None and request.signal != 0
        if is_stopping or not restarts.allow_in(folder, failure):
            raise final_error(failure, folder)
        report = restart_report(failure, folder, restarts.count)
    if not folder.has_ending():
        raise RankFailed(f"rank 0 ended before it wrote a result\n  full log: {folder.log(0)}")


def _gather(machines: Machines, request: StopRequest | None, when: str) -> None:
    """Wait for enough hosts. A request to stop ends the wait: no rank is running, so there is nothing to save."""
    with listening(request, NOTHING_RAN):
        machines.gather(lambda: request is not None and request.signal != 0)
    if request is not None and request.signal:
        raise request.stopped(when)
