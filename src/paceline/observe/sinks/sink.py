"""The interface of sinks, which receive the events of a run, and the feeder that delivers the events to one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.observe.event_types import Event, Parser, values_in
from paceline.observe.tail import Tail

# Kinds of events, in the order in which they follow each other at one step.
PLOTTED = ("step", "pace", "evaluation", "epoch", "logged")
NOT_PLOTTED = ("event", "time", "step", "steps", "epochs")


class Sink:
    """Receives the events of one run, in order; docs/events.md lists them and has an example.

    Subclasses implement `write`, and the other methods where they need them. They run outside the ranks: a sink that
    is slow or raises an error neither delays nor ends training. After an error a new sink receives all events again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def restart(self) -> None:
        """Called before the first event, and again before all events are delivered again from the first one.

        Events are delivered again when a run resumes from an earlier step: later events are removed from the file.
        """

    def write(self, event: Event) -> None:
        """Receive one event."""
        raise NotImplementedError(f"{type(self).__name__} must implement write(event)")

    def flush(self) -> None:
        """Called when all events so far have been written."""

    def close(self) -> None:
        """Called once, after the last event; not after an error."""


class SinkFeeder:
    """Delivers the events in a file to one sink, while the file grows."""

    def __init__(self, events: Path, sink: Sink) -> None:
        self.sink, self._events = sink, events
        self.start_over()

    def start_over(self) -> None:
        """Deliver all events again, from the first one, at the next call of `deliver`."""
        self._tail, self._parser = Tail(self._events), Parser()

    def deliver(self) -> None:
        """Deliver the new events."""
        lines = list(self._tail.lines())
        if self._tail.is_replaced:
            self.sink.restart()
        for line in lines:
            event = self._parser.parse(line)
            if event is not None:
                self.sink.write(event)
        if lines:
            self.sink.flush()


def numbers_in(event: Event) -> Iterator[tuple[str, float]]:
    """The names and values of an event that are plotted; a list has one number per rank."""
    yield from values_in(event)
    for name, value in event.items():
        if isinstance(value, list):
            yield from ((f"{name}/rank-{rank}", number) for rank, number in enumerate(value))
        elif isinstance(value, (int, float)) and name not in NOT_PLOTTED:
            yield name, value
