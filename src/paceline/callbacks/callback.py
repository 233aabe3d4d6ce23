"""`Callback`: the interface by which users and our own features attach code to a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.callbacks.run import Run


class Callback:
    """Code that a training loop calls, from `Trainer(callbacks=[...])`; every method is optional.

    Each rank has a copy and calls it at the same step with the same numbers. A method that is not overridden costs
    nothing.
    """

    needs_step_metrics = True  # False: `on_step` receives an empty mapping, and the ranks exchange no values for it

    def on_start(self, run: Run) -> None:
        """Called before the first step of this attempt, after a checkpoint was restored."""

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Called after an update, with loss, values, grad_norm and lr. May change the model under `torch.no_grad()`."""

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Called after an evaluation, with its row: at the end of an epoch, and within it by `evaluate.every_steps`."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called after a checkpoint was published."""

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Called at the end of the loop, with the reason of a stop, or None if the run is complete."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this callback for a checkpoint: plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, when a run resumes."""

    def overrides(self, method: str) -> bool:
        """Whether a subclass has defined a method of this interface."""
        return getattr(type(self), method) is not getattr(Callback, method)
