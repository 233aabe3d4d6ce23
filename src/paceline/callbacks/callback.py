"""`Callback`, what users and our own features attach to the managed loop, and `Run`, what a callback sees of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Run:
    """A run as its callbacks see it. Everything but `rank` and `device` is equal on all ranks."""

    rank: int
    world_size: int
    device: torch.device
    folder: Path
    model: torch.nn.Module  # without DDP's wrapper
    total_steps: int | None  # None where an iterable data set decides
    step_number: int = 0  # updates completed
    epoch: int = 0  # from 1; 0 before the first step
    history: list[dict[str, Any]] = field(default_factory=list)  # one row for each epoch
    stop_requested: str | None = None  # the reason that was given to `stop`
    save_requested: bool = False
    finish_requested: str | None = None  # the reason that was given to `finish`

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def save(self) -> None:
        """Ask for a checkpoint: of this step when called in `on_evaluate`, of the next one in `on_step`."""
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Ask all ranks to save and stop after the next step; the run can be resumed, and is not complete."""
        self.stop_requested = reason

    def finish(self, reason: str) -> None:
        """Ask to end the run as complete: after this step when called in `on_evaluate`, after the next in `on_step`."""
        self.finish_requested = reason


class Callback:
    """Attached to the managed loop by `Trainer(callbacks=[...])`; every method is optional.

    Each rank has a copy and calls it at the same step with the same numbers. A method that is not overridden costs
    nothing.
    """

    needs_step_metrics = True  # False: `on_step` gets an empty mapping, and the ranks exchange nothing for it

    def on_start(self, run: Run) -> None:
        """Before the first step of this attempt, after a checkpoint was restored."""

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """After an update, with its loss, grad_norm and lr. May change the model under `torch.no_grad()`."""

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """After an evaluation, with its row: at the end of an epoch, and within it by `evaluate.every_steps`."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint was published."""

    def on_stop(self, run: Run, reason: str | None) -> None:
        """At the end of the loop: the reason of a stop, or None where the run is complete."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, when a run resumes."""

    def overrides(self, method: str) -> bool:
        """Whether a subclass has defined a method of this interface."""
        return getattr(type(self), method) is not getattr(Callback, method)
