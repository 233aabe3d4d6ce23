"""`LearningRateMonitor`: the learning rate of each parameter group."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.callbacks.arguments import COUNT, check
from paceline.callbacks.callback import Callback
from paceline.callbacks.run import Run


class LearningRateMonitor(Callback):
    """Logs the learning rate of each parameter group as lr/group-0, lr/group-1, …, when one of them has changed.

    `step` events have the rate of the first group only. Rates are logged at most every `every_steps` steps.
    """

    needs_step_metrics = False

    def __init__(self, every_steps: int = 1) -> None:
        check("LearningRateMonitor", COUNT, every_steps=every_steps)
        self.every_steps = every_steps
        self._last: list[float] = []

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Log the rates of this step."""
        if run.step_number % self.every_steps == 0 and (lrs := run.learning_rates()) != self._last:
            self._last = lrs
            run.log(**{f"lr/group-{group}": lr for group, lr in enumerate(lrs)})

    def state_dict(self) -> dict[str, list[float]]:
        """The rates that were logged last."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore the rates that were logged last."""
        self._last = state["last"]
