"""The base of the sinks for W&B and MLflow: sends each number once, over all attempts of a run, to one remote run.

The run folder stores the tracker's id of the run and the last event that was sent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.config import read_yaml
from paceline.observe.event_types import Event
from paceline.observe.sinks.sink import PLOTTED, Sink, numbers_in
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder

RunEnding = Literal["finished", "stopped", "failed"]
ENDINGS: dict[str, RunEnding] = {"run_finished": "finished", "run_stopped": "stopped", "run_started": "failed"}


class TrackerSink(Sink, ABC):
    """A sink for an experiment tracker; subclasses open a remote run, log numbers, send them and end the run."""

    name: ClassVar[str]  # of its state file in the run folder

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._state_file = RunFolder(run_dir).tracker(self.name)
        state: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        self._run_id: str | None = state.get("id")
        kind = state.get("kind", "epoch" if state.get("is_epoch") else "pace")  # version 1 had no `pace` events
        self._sent = state.get("step", -1), PLOTTED.index(kind)
        self._is_open = False
        self._ending: RunEnding = "failed"  # unless an event reports another ending

    def restart(self) -> None:
        """Forget the ending; numbers that were sent are not sent again."""
        self._ending = "failed"

    def write(self, event: Event) -> None:
        """Log the numbers of an event that was not sent before; store how the run has ended."""
        kind = event["event"]
        self._ending = ENDINGS.get(kind, self._ending)
        if kind in PLOTTED and (position := (event["step"], PLOTTED.index(kind))) > self._sent:
            self._open()
            self.log(event, dict(numbers_in(event)))
            self._sent = position

    def flush(self) -> None:
        """Send what was logged, and save the position of the last event."""
        if self._is_open:
            self.send()
            step, kind = self._sent
            write_json(self._state_file, {"id": self._run_id, "step": step, "kind": PLOTTED[kind]})

    def close(self) -> None:
        """End the remote run with the state in which this run ended."""
        if self._run_id is not None and self._ending == "finished":
            self._open()  # an attempt without new numbers ends the remote run, too
        if self._is_open:
            self.end(self._ending)

    def _open(self) -> None:
        if not self._is_open:
            config = read_yaml(RunFolder(self.run_dir).config)
            self._run_id = self.open(str(config["name"]), config, self._run_id)
            self._is_open = True
            self.flush()

    @abstractmethod
    def open(self, project: str, config: dict[str, Any], run_id: str | None) -> str:
        """Create a remote run, or reopen the one with `run_id`; return its id."""

    @abstractmethod
    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Log the numbers of an event; they may be sent later."""

    @abstractmethod
    def send(self) -> None:
        """Send everything that was logged."""

    @abstractmethod
    def end(self, ending: RunEnding) -> None:
        """End the remote run."""
