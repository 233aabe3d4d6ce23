"""What takes the events of a run somewhere else: TensorBoard's files, W&B, MLflow. Each is a sink with a channel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from paceline.observe.event_types import Event, Parser
from paceline.observe.tail import Tail

PLOTTED = ("step", "pace", "epoch")  # kinds of events, in the order in which they follow each other at one step
NOT_PLOTTED = ("event", "time", "step", "steps", "epochs")


class Sink(Protocol):
    """Takes events, in their order."""

    def restart(self) -> None:
        """All events come again: the run is older than the sink, or some were taken back."""

    def take(self, event: Event) -> None:
        """One event."""

    def flush(self) -> None:
        """These were all there are for the moment."""

    def close(self) -> None:
        """There will be no more."""


class Channel:
    """Brings the events in a file to one sink."""

    def __init__(self, events: Path, sink: Sink) -> None:
        self.sink, self._events = sink, events
        self.start_over()

    def start_over(self) -> None:
        """Bring everything again, from the first event on."""
        self._tail, self._parser = Tail(self._events), Parser()

    def look(self) -> None:
        """Bring what is new."""
        lines = list(self._tail.lines())
        if self._tail.is_anew:
            self.sink.restart()
        for line in lines:
            event = self._parser.parse(line)
            if event is not None:
                self.sink.take(event)
        if lines:
            self.sink.flush()


def numbers_in(event: Event) -> Iterator[tuple[str, float]]:
    """What is plotted of an event; a list holds one number for each rank."""
    for name, value in event.items():
        if isinstance(value, list):
            yield from ((f"{name}/rank-{rank}", of_rank) for rank, of_rank in enumerate(value))
        elif isinstance(value, (int, float)) and name not in NOT_PLOTTED:
            yield name, value
