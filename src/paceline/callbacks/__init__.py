"""Callbacks of a training loop: the interface `Callback`, the view `Run` of a run, and the callbacks we ship.

Owns the behaviour of each callback where a loop calls it. Promises that its state is in every checkpoint, and
that all ranks call it with the same numbers. Must not depend on the loops, which call the methods of `Callback`.
"""

from paceline.callbacks.best_checkpoint import BestCheckpoint
from paceline.callbacks.callback import Callback
from paceline.callbacks.early_stopping import EarlyStopping
from paceline.callbacks.gradual_unfreeze import GradualUnfreeze
from paceline.callbacks.image_logger import ImageLogger
from paceline.callbacks.learning_rate_monitor import LearningRateMonitor
from paceline.callbacks.mean_teacher import MeanTeacher
from paceline.callbacks.run import Run, current_run

__all__ = [
    "BestCheckpoint", "Callback", "EarlyStopping", "GradualUnfreeze", "ImageLogger", "LearningRateMonitor",
    "MeanTeacher", "Run", "current_run",
]  # fmt: skip
