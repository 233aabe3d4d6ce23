"""Weights & Biases. Its own environment variables decide where a run is stored: WANDB_MODE, WANDB_PROJECT, …"""

from __future__ import annotations

import secrets
from typing import Any

from paceline.observe.event_types import Event
from paceline.observe.sinks.tracker import RunEnding, TrackerSink

EXIT_CODES: dict[RunEnding, int] = {"finished": 0, "failed": 1, "stopped": 3}


class WandbSink(TrackerSink):
    """A run of W&B, whose local files are in the run folder."""

    name = "wandb"

    def open(self, project: str, config: dict[str, Any], run_id: str | None) -> str:
        """Create a run in `project`, or reopen the one with `run_id`; return its id."""
        import wandb

        self._run = wandb.init(
            project=wandb.setup().settings.project or project,
            name=wandb.setup().settings.run_name or self.run_dir.name,
            dir=str(self.run_dir),
            config=config,
            id=run_id or secrets.token_hex(4),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # A resumed run may add numbers to a step that W&B has closed, so W&B's own counter differs from our step.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Log the numbers of an event."""
        axes = {"step": event["step"], "_timestamp": event["time"]}
        self._run.log(numbers | axes, step=max(event["step"], self._run.step))

    def send(self) -> None:
        """Do nothing: W&B sends from its own process."""

    def end(self, ending: RunEnding) -> None:
        """End the run."""
        self._run.finish(exit_code=EXIT_CODES[ending])
