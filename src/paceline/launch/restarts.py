"""Whether the ranks are started again after a failure (pure)."""

from __future__ import annotations

from paceline import errors
from paceline.observe.failures import HANG, MISMATCH, Failure
from paceline.system.disk import is_of_full_disk

WORTH_ANOTHER_TRY = "ReplicasDiffer"  # among our own errors: all others would come again


class Restarts:
    """Counts restarts since the run has last progressed, and knows failures that would only repeat."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._saved_step = -1
        self._last: tuple[str, str, str] | None = None

    def allow(self, failure: Failure, saved_step: int) -> bool:
        """Whether to start again; `saved_step` is the newest checkpoint's, -1 if there is none."""
        if saved_step > self._saved_step:
            self._saved_step, self.used = saved_step, 0
        if is_of_full_disk(failure.text):  # it would only train again what it cannot keep
            return False
        if not failure.is_killed:
            this = (failure.error, failure.text, failure.place)
            repeats, self._last = this == self._last, this
            is_ours = hasattr(errors, failure.error) and failure.error != WORTH_ANOTHER_TRY
            comes_again = repeats or is_ours or failure.error == MISMATCH
            # Before the first checkpoint an error is most likely the user's own, who wants to see it now.
            is_early = saved_step < 0 and failure.error != HANG
            if comes_again or is_early or failure.place.startswith("building"):
                return False
        if self.used >= self.limit:
            return False
        self.used += 1
        return True


def restarted_line(first: Failure, saved_step: int) -> str:
    """What has ended the last attempt, and where the next one begins; `saved_step` is -1 without a checkpoint."""
    beginning = f"step {saved_step}" if saved_step >= 0 else "the beginning"
    return f"{first.summarize(saved_step)}; starting again from {beginning}"
