"""The rules of restarts: how often and after which failures the ranks may restart, and the reports about it."""

from __future__ import annotations

from shlex import quote

from paceline import errors
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.errors import PacelineError, RankFailed
from paceline.observe.failures import HANG, MISMATCH, Failure
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import keep_hang_report
from paceline.system.disk import is_of_full_disk

MAX_RESTARTS = 3  # of the managed loop; the user's own loop would start from the beginning
TRANSIENT = "ReplicasDiffer"  # the only error of Paceline itself that may not occur again


def limit_of(config: Config, *, can_save: bool) -> int:
    """The number of restarts that are allowed without progress."""
    return config.max_restarts if config.max_restarts is not None else MAX_RESTARTS if can_save else 0


class Restarts:
    """Decides whether ranks are restarted: counts restarts since the last progress, and rejects repeated failures."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._saved_step = -1
        self._last: tuple[str, str, str] | None = None

    @property
    def count(self) -> str:
        """The number of the current restart, for the report."""
        return f" (restart {self.used} of {self.limit})"

    def allow(self, failure: Failure, saved_step: int) -> bool:
        """Whether to restart the ranks; `saved_step` is the newest checkpoint's, -1 if there is none."""
        if saved_step > self._saved_step:
            self._saved_step, self.used = saved_step, 0
        if is_of_full_disk(failure.text):  # the repeated steps could not be saved either
            return False
        if not failure.is_killed:
            this = (failure.error, failure.text, failure.place)
            is_repeated, self._last = this == self._last, this
            is_ours = hasattr(errors, failure.error) and failure.error != TRANSIENT
            will_repeat = is_repeated or is_ours or failure.error == MISMATCH
            # Before the first checkpoint an error is most likely in the user's code, so it is shown immediately.
            is_early = saved_step < 0 and failure.error != HANG
            if will_repeat or is_early or failure.place.startswith("building"):
                return False
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def allow_in(self, folder: RunFolder, failure: Failure) -> bool:
        """Whether to restart the ranks of this run folder, which must still contain the files that they need."""
        saved_step = saved_step_of(folder)
        return loss_of(folder, saved_step) is None and self.allow(failure, saved_step)


def saved_step_of(folder: RunFolder) -> int:
    """The step of the newest checkpoint, -1 if there is none."""
    return Store(folder.checkpoints).newest_step()


def loss_of(folder: RunFolder, saved_step: int) -> str | None:
    """The reason why ranks cannot be restarted after the run folder was deleted, and what remains; None if they can."""
    if folder.job.exists():
        return None
    if saved_step < 0:
        rest = "no checkpoint is left; start a new run"
    else:
        rest = f"step {saved_step} was saved after that; resume with --resume {quote(str(folder.path))}"
    return f"{folder.path} was deleted while the run was training, so its ranks cannot be restarted; {rest}"


def restart_report(failure: Failure, folder: RunFolder, count: str = "") -> str:
    """The text of a `restarted` event: why the last attempt ended, and where the next one starts.

    Renames the table of a hang, so that the next attempt does not replace it.
    """
    saved_step = saved_step_of(folder)
    beginning = f"step {saved_step}" if saved_step >= 0 else "the beginning"
    table = keep_hang_report(folder)
    rest = f"; all ranks are in {table}" if table is not None else ""
    return f"{failure.summarize(saved_step)}; restarting from {beginning}{count}{rest}"


def final_error(failure: Failure, folder: RunFolder) -> PacelineError:
    """The error that ends a run after its last attempt."""
    if loss := loss_of(folder, saved_step_of(folder)):
        return RankFailed(f"{failure.describe()}\n{loss}")
    return failure.to_error()
