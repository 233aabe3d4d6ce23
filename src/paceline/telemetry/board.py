"""TensorBoard: the numbers in `events.jsonl` as a file that TensorBoard reads.

The file is made anew in each life of a run and whenever the events are taken back, so it holds each step once.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.telemetry.events import parse
from paceline.telemetry.tail import Tail

NOT_PLOTTED = ("event", "time", "step", "steps", "epochs")


class Board:
    """A consumer of the events; it opens its file with the first number there is."""

    def __init__(self, events: Path, folder: Path) -> None:
        self._events, self._folder = events, folder
        self._tail = Tail(events)
        self._writer: Any = None

    def look(self) -> None:
        """Take in what is new. A disk that is full costs the file, which is made again later."""
        lines = list(self._tail.lines())
        try:
            if self._tail.is_anew:
                self._restart()
            for line in lines:
                event = parse(line)
                if event is not None and event["event"] in ("step", "epoch"):
                    self._take(event)
            if lines and self._writer is not None:
                self._writer.flush()
        except OSError:
            self._tail = Tail(self._events)

    def close(self) -> None:
        """End of this life of the run."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # what the disk has no room for
                writer.close()

    def _restart(self) -> None:
        self.close()
        for path in self._folder.glob("events.out.tfevents.*.paceline"):
            path.unlink()

    def _take(self, event: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in event.items() if isinstance(v, (int, float)) and k not in NOT_PLOTTED}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(Event(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.paceline"
            self._writer = RecordWriter((self._folder / name).open("wb"))
            self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writer.write(event.SerializeToString())
