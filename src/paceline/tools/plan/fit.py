"""The largest `batch_size` that fits a GPU, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.run.job import Task
from paceline.tools.plan.measure import shortened, start

NO_MEMORY = "out of memory"  # in the error of a rank that could not allocate any
REFINEMENTS = 3  # after doubling: the result is at most an eighth too small
TASK = Task("paceline.tools.plan.task:measure", {"warm_up": 1, "steps": 1})


def largest_batch(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest size up to `most` that fits, where `first` does; sizes are doubled, then the gap is halved (pure)."""
    good, bad = first, most + 1
    while 2 * good <= most and bad > most:
        if fits(2 * good):
            good *= 2
        else:
            bad = 2 * good
    for _ in range(REFINEMENTS):
        middle = (good + bad) // 2
        if middle == good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def largest_batch_here(config: Config, ranks: int, samples: int, parent: Path, folder: Path) -> int:
    """The largest `batch_size` with which this config trains on the GPUs of this machine."""

    def fits(batch_size: int) -> bool:
        short = shortened(config, ranks, 3).model_copy(update={"batch_size": batch_size})
        try:
            start(short, TASK, parent, folder)
        except PacelineError as error:
            if NO_MEMORY in str(error):
                return False
            raise
        return True

    return largest_batch(fits, config.batch_size, samples)
