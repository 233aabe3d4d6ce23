"""`GradualUnfreeze`: parts of a pretrained model start to train one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.callbacks.arguments import COUNT, TEXT, check
from paceline.callbacks.callback import Callback
from paceline.callbacks.run import Run
from paceline.errors import ConfigError


class GradualUnfreeze(Callback):
    """Freezes modules at the start, and unfreezes one of them, in their order, each `every_epochs` or `every_steps`.

    Other modules train from the start. Which modules are frozen depends on the step alone, so nothing is saved.
    """

    needs_step_metrics = False

    def __init__(self, *modules: str, every_epochs: int | None = None, every_steps: int | None = None) -> None:
        if not modules or (every_epochs is None) == (every_steps is None):
            raise ConfigError("GradualUnfreeze needs names of modules, and one of every_epochs and every_steps")
        check("GradualUnfreeze", TEXT, **{f"module {place}": name for place, name in enumerate(modules)})
        every = {"every_steps": every_steps} if every_epochs is None else {"every_epochs": every_epochs}
        check("GradualUnfreeze", COUNT, **every)
        self.modules, self.every_epochs, self.every_steps = modules, every_epochs, every_steps
        self._trained = 0  # the number of modules that already train

    def on_start(self, run: Run) -> None:
        """Freeze the modules that do not train yet, and unfreeze the others."""
        self._trained = self._trained_at(run)
        run.unfreeze(*self.modules[: self._trained])  # the checkpoint may come from a run with other intervals
        run.freeze(*self.modules[self._trained :])

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Unfreeze the modules that train from the next step on."""
        trained = self._trained_at(run)
        if trained != self._trained:
            run.unfreeze(*self.modules[self._trained : trained])
            self._trained = trained

    def _trained_at(self, run: Run) -> int:
        """The number of modules that train after this step."""
        done = run.step_number // self.every_steps if self.every_steps else run.epochs_done // (self.every_epochs or 1)
        return min(done, len(self.modules))
