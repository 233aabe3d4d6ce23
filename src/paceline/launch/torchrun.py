"""Joins a world that torchrun, or anything that sets the same variables, has started."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext

from paceline import failure, result
from paceline.config import Config
from paceline.errors import RankFailed
from paceline.job import Task
from paceline.launch.environment import chosen_threads, ranks_here
from paceline.progress import Progress
from paceline.result import Outcome
from paceline.run_folder import RunFolder
from paceline.telemetry.follow import Follower
from paceline.world import join


def start(config: Config, task: Task) -> Outcome:
    """Do the task as one of the ranks, and return rank 0's outcome on each. All ranks."""
    threads = config.threads or chosen_threads(config.lanes or ranks_here(), injected="1")
    config = config.model_copy(update={"threads": threads})
    with join(config) as world:
        folder = RunFolder(world.decide(lambda: RunFolder.create(config).path))
        progress = Progress()
        try:
            # torchrun owns the terminal and the ranks' output; rank 0 adds only the progress.
            with Follower(folder, ranks=0) if world.is_main else nullcontext():
                task(config, folder, world, progress)
        except Exception as error:
            captured = failure.capture(error, rank=world.rank, progress=progress, folder=folder)
            with folder.log(world.rank).open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            raise RankFailed(captured.describe()) from error
        outcome = world.decide(lambda: result.collect(folder))
    # Gloo's threads let go of the last tensors a moment after the operations are done. Where that meets the end of the
    # interpreter, the process aborts; a script may end right after this.
    time.sleep(0.1)
    return outcome
