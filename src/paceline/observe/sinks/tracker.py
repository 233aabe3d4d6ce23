"""A tracker is a sink that sends each number once, over all lives of a run, and goes on with the run that it knows.

Where it was is kept in the run folder: the tracker's own name of the run, and the last event that it has been sent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, Literal

from paceline.config import read_yaml
from paceline.observe.event_types import Event
from paceline.observe.sinks.sink import PLOTTED, numbers_in
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder

Ending = Literal["finished", "stopped", "failed"]
ENDINGS: dict[str, Ending] = {"run_finished": "finished", "run_stopped": "stopped", "run_started": "failed"}


class Tracker(ABC):
    """What W&B and MLflow have in common; they open, log, send and end."""

    name: ClassVar[str]

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._kept = folder.tracker(self.name)
        kept: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            kept = json.loads(self._kept.read_text(encoding="utf-8"))
        self._id: str | None = kept.get("id")
        kind = kept.get("kind", "epoch" if kept.get("is_epoch") else "pace")  # version 1 had no `pace` events
        self._sent = kept.get("step", -1), PLOTTED.index(kind)
        self._is_open = False
        self._ending: Ending = "failed"  # unless the run says otherwise before it ends

    def restart(self) -> None:
        """The run says the same again; what has been sent stays."""
        self._ending = "failed"

    def take(self, event: Event) -> None:
        """Send the numbers that are new; remember how the run has ended."""
        kind = event["event"]
        self._ending = ENDINGS.get(kind, self._ending)
        if kind in PLOTTED and (place := (event["step"], PLOTTED.index(kind))) > self._sent:
            self._open()
            self.log(event, dict(numbers_in(event)))
            self._sent = place

    def flush(self) -> None:
        """Send what has been taken, and write down how far that was."""
        if self._is_open:
            self.send()
            step, kind = self._sent
            write_json(self._kept, {"id": self._id, "step": step, "kind": PLOTTED[kind]})

    def close(self) -> None:
        """Say how the run has ended."""
        if self._id is not None and self._ending == "finished":
            self._open()  # a life that had nothing new to tell
        if self._is_open:
            self.end(self._ending)

    def _open(self) -> None:
        if not self._is_open:
            config = read_yaml(self.folder.config)
            self._id = self.open(str(config["name"]), config, self._id)
            self._is_open = True
            self.flush()

    @abstractmethod
    def open(self, name: str, config: dict[str, Any], known: str | None) -> str:
        """Begin a run, or go on with the one that is `known`; its id."""

    @abstractmethod
    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Take the numbers of an event."""

    @abstractmethod
    def send(self) -> None:
        """See to it that everything taken is sent."""

    @abstractmethod
    def end(self, ending: Ending) -> None:
        """Close the run."""
