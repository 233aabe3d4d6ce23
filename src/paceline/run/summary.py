"""One-line descriptions of a run: how it ended, or how to resume it."""

from __future__ import annotations

from paceline.config import read_yaml
from paceline.formatting import outcome_text
from paceline.run.layout import RunFolder
from paceline.run.result_file import read_result


def result_text(folder: RunFolder) -> str | None:
    """The last step, metrics and weights of a finished run; None if it has no result."""
    facts = read_result(folder.result)
    return outcome_text(facts.step, facts.metrics, facts.weights_sha256) if facts is not None else None


def resume_hint(folder: RunFolder) -> str:
    """The way to continue a run that has no result and no running process."""
    is_own = folder.config.exists() and "train_fn" in read_yaml(folder.config)
    if is_own and not folder.has_checkpoints():
        return "it has its own loop (train_fn) and no checkpoint; --resume auto starts it from the beginning"
    return "resume it with --resume auto"
