"""Weights & Biases. Its own environment variables decide where a run goes: WANDB_MODE, WANDB_PROJECT and the like."""

from __future__ import annotations

import secrets
from typing import Any

from paceline.observe.event_types import Event
from paceline.observe.sinks.tracker import Ending, Tracker

EXIT_CODES: dict[Ending, int] = {"finished": 0, "failed": 1, "stopped": 3}


class WandbRun(Tracker):
    """A run of W&B; its files are in the run folder."""

    name = "wandb"

    def open(self, name: str, config: dict[str, Any], known: str | None) -> str:
        """Begin a run, or go on with the one that is `known`; its id."""
        import wandb

        self._run = wandb.init(
            project=wandb.setup().settings.project or name,
            name=wandb.setup().settings.run_name or self.folder.path.name,
            dir=str(self.folder.path),
            config=config,
            id=known or secrets.token_hex(4),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # A run that goes on may have to add to a step that W&B has closed, so it counts by itself.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Take the numbers of an event."""
        known = {"step": event["step"], "_timestamp": event["time"]}
        self._run.log(numbers | known, step=max(event["step"], self._run.step))

    def send(self) -> None:
        """W&B does so by itself."""

    def end(self, ending: Ending) -> None:
        """Close the run."""
        self._run.finish(exit_code=EXIT_CODES[ending])
