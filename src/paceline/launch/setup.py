"""Preparation by launchers before the first rank starts: fix threads and lanes, write the job to the run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from paceline.checkpoint.resume import RestorePoint
from paceline.config import Config
from paceline.data import batches
from paceline.errors import ConfigError, RankFailed
from paceline.mirror.place import is_mirrored
from paceline.mirror.supervisor import mirroring
from paceline.observe.events import Events
from paceline.observe.sinks.supervisor import running_sinks
from paceline.observe.tail import NO_FILE, file_identity
from paceline.run import job
from paceline.run.job import Job, Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt
from paceline.system.cores import chosen_threads

TRAIN = Task("paceline.worker.main:train")


def with_mirror(config: Config, task: Task) -> Config:
    """Check the mirror of a run, and download the run that `resume` names from one: the config with its new folder.

    For one process, before it handles signals: Ctrl-C ends a download.
    """
    if task != TRAIN:
        return config
    if config.checkpoint.mirror is not None:
        from paceline.mirror.check import check_mirror

        check_mirror(config)
    if config.resume in ("auto", "never") or not is_mirrored(config.resume):
        return config
    from paceline.mirror.download import fetch_to_resume

    folder = fetch_to_resume(config)
    return config.model_copy(update={"resume": str(folder), "run_dir": folder})


def can_save(config: Config, task: Task) -> bool:
    """Whether the ranks save on a stop request."""
    return task == TRAIN and config.keeps_state


def report_new_run(config: Config, restore_point: RestorePoint) -> None:
    """Print that `resume: auto` has found nothing to resume, which a user may not expect."""
    if config.resume == "auto" and config.keeps_state and restore_point.run_dir is None:
        place = config.run_dir or f"runs/{config.name}"
        print(f"resume=auto found no unfinished run in {place}; a new run starts", file=sys.stderr, flush=True)


def with_lanes_and_threads(
    config: Config, restore_point: RestorePoint, ranks: int, new_lanes: int, ranks_per_machine: Callable[[int], int]
) -> Config:
    """The config with the threads and lanes of all attempts; `new_lanes` are for a run that is not resumed."""
    lanes = restore_point.lanes(config)
    # Sums inside an operator depend on its threads, so the threads follow the lanes, which belong to the run.
    threads = restore_point.threads(config) or chosen_threads(ranks_per_machine(lanes or ranks))
    config = config.model_copy(update={"threads": threads})
    if config.keeps_state:
        config = config.model_copy(update={"lanes": lanes or new_lanes})
    batches.lanes_of(0, ranks, config.lanes or ranks)  # raises here the errors that every rank would raise
    return config


@contextmanager
def staged(packed: Job, folder: RunFolder, config: Config) -> Iterator[None]:
    """Keep the job in the run folder, and run the trackers and the mirror inside; write an event if the run fails."""
    trackers = running_sinks(config.log.trackers, folder)
    with _stored(packed, folder), mirroring(config, folder), trackers, failure_reported(folder):
        yield


@contextmanager
def _stored(packed: Job, folder: RunFolder) -> Iterator[None]:
    """Keep the job in the run folder inside, without the files of earlier attempts."""
    try:
        folder.job.unlink(missing_ok=True)  # a launcher that was killed may have left it
        job.save(packed, folder.job)
        clear_last_attempt(folder)
    except OSError as error:
        with suppress(OSError):
            folder.job.unlink(missing_ok=True)
        raise ConfigError(
            f"run_dir={folder.path} cannot be written to: {error.strerror}; free some space, or choose another folder"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            folder.job.unlink(missing_ok=True)  # it contains a copy of the data


@contextmanager
def failure_reported(folder: RunFolder) -> Iterator[None]:
    """Write an event if the run fails inside; not if it is rejected before it changes the folder of an earlier run."""
    before = file_identity(folder.events)
    try:
        yield
    except (ConfigError, RankFailed) as error:
        if file_identity(folder.events) != before or before == NO_FILE:
            with closing(Events(folder.events)) as events:
                events.write("run_failed", text=str(error))
        raise
