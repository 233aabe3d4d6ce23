"""Joins ranks that torchrun or `srun` has started, or another program that sets the variables of torchrun."""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import resume
from paceline.config import Config
from paceline.data.workers import end_workers
from paceline.errors import ConfigError, RankFailed, handle_uncaught
from paceline.launch.environment import is_restarted, join_step, ranks_here
from paceline.launch.relocation import FolderWatcher
from paceline.launch.setup import report_new_run, with_mirror
from paceline.mirror.supervisor import mirroring
from paceline.observe import failures
from paceline.observe.progress import Progress
from paceline.observe.screen.follower import Follower
from paceline.observe.sinks.supervisor import running_sinks
from paceline.observe.watchdog import watching
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt, open_run
from paceline.run.outcome import Outcome, collect
from paceline.system.cores import chosen_threads
from paceline.world import join, use_threads

RESULT_S = 60.0  # for rank 0 to write the result


def start_in_step(config: Config, task: Task) -> Outcome:
    """Run the task as one of the tasks of a Slurm step. All ranks."""
    join_step()
    return start(config, task)


def start(config: Config, task: Task) -> Outcome:
    """Run the task as one of the ranks, and return rank 0's outcome on each. All ranks."""
    progress = Progress()
    with ExitStack() as held, join(config) as world:
        handle_uncaught()  # again: torch has set a hook, which names the rank in front of each line
        # The agent of each host counts its own restarts: an agent that joined late has a lower count.
        if any(world.gather_objects(is_restarted())):
            config = config.model_copy(update={"resume": "auto"})
        path, settled = world.decide(lambda: _open(with_mirror(config, task), world.size, held))
        config = config.model_copy(update=settled)
        use_threads(config)
        folder = RunFolder(path)
        try:
            # torchrun owns the terminal and the ranks' output; rank 0 adds only the progress.
            follower = Follower(folder, ranks=0, from_now=True, tensorboard=config.log.tensorboard)
            watch = watching(config, folder, world.rank, world.size, progress, has_launcher=False)
            tracked = running_sinks(config.log.trackers if world.is_main else (), folder)
            mirrored = mirroring(config, folder, is_active=world.is_main)
            with mirrored, tracked, follower if world.is_main else nullcontext(), watch:
                task(config, folder, world, progress)
                end_workers()
        except Exception as error:
            captured = failures.capture(error, rank=world.rank, progress=progress, folder=folder)
            with folder.log(world.rank).open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            if isinstance(error, ConfigError):
                raise
            raise RankFailed(captured.describe()) from error
        outcome = world.decide(lambda: collect(folder)) if dist.is_initialized() else _awaited_outcome(folder)
    # Gloo's threads release the last tensors a moment after the operations are done. If the interpreter exits at that
    # moment, the process aborts; a script may end right after this.
    time.sleep(0.1)
    return outcome


def _awaited_outcome(folder: RunFolder) -> Outcome:
    """Rank 0's outcome from the run folder: the user's own loop has destroyed the process group."""
    deadline = time.monotonic() + RESULT_S
    while not folder.result.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return collect(folder)


def _open(config: Config, world_size: int, held: ExitStack) -> tuple[Path, dict[str, Any]]:
    """Create the run folder or find that of the run to resume, and lock it until `held` is closed. Rank 0 only."""
    restore_point = resume.find_restore_point(config)
    report_new_run(config, restore_point)
    lanes = restore_point.lanes(config)
    threads = restore_point.threads(config) or chosen_threads(lanes or ranks_here(), injected="1")
    settled: dict[str, Any] = {"threads": threads, "lanes": lanes or world_size if config.keeps_state else None}
    settled |= {"resume": config.resume, "run_dir": config.run_dir}  # a run from a mirror has a folder here
    config = config.model_copy(update=settled)
    folder = held.enter_context(open_run(config, restore_point.run_dir))
    held.enter_context(FolderWatcher(folder, config))
    clear_last_attempt(folder)
    return folder.path, settled
