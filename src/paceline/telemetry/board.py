"""TensorBoard: the numbers in `events.jsonl` as a file that TensorBoard reads.

The file is made anew in each life of a run and whenever the events are taken back, so it holds each step once. A run
that has finished ends it with its config, for the tab HParams.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
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
        self._finished: dict[str, Any] | None = None  # how the run has ended, if it has

    def look(self) -> None:
        """Take in what is new. A disk that is full costs the file, which is made again later."""
        lines = list(self._tail.lines())
        try:
            if self._tail.is_anew:
                self._restart()
            for line in lines:
                event = parse(line)
                if event is not None:
                    self._take(event)
            if lines and self._writer is not None:
                self._writer.flush()
        except OSError:
            self._tail = Tail(self._events)

    def close(self) -> None:
        """End of this life of the run."""
        if self._writer is not None:
            with suppress(OSError):  # what the disk has no room for
                self._end_file()
        self._writer = None

    def _end_file(self) -> None:
        # Only now, because a run that has finished may be made longer, and TensorBoard believes the first it reads.
        if self._finished is not None and "config" in self._finished:
            self._write_hparams(self._finished)
        self._writer.close()

    def _restart(self) -> None:
        self._finished = None
        self.close()
        for path in self._folder.glob("events.out.tfevents.*.paceline"):
            path.unlink()

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] in ("step", "epoch"):
            self._plot(event)
        elif event["event"] in ("run_started", "run_finished"):
            self._finished = event if event["event"] == "run_finished" else None

    def _plot(self, event: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _numbers(event)]
        self._write(Event(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def _write_hparams(self, finished: dict[str, Any]) -> None:
        """The config as hyper-parameters; the tab takes the last values of everything plotted as metrics."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

        start = SessionStartInfo()
        for name, value in _hparams(finished["config"]):
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = value
        end = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=finished["time"])
        for tag, content in (
            (metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
            (metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)),
        ):
            value = Summary.Value(
                tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR
            )
            self._write(Event(wall_time=finished["time"], summary=Summary(value=[value])))

    def _write(self, event: Any) -> None:
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.paceline"
            self._writer = RecordWriter((self._folder / name).open("wb"))
            self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writer.write(event.SerializeToString())


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is plotted of an event; a list holds one number for each rank."""
    for name, value in event.items():
        if isinstance(value, list):
            yield from ((f"{name}/rank-{rank}", of_rank) for rank, of_rank in enumerate(value))
        elif isinstance(value, (int, float)) and name not in NOT_PLOTTED:
            yield name, value


def _hparams(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """The keys of a config that are set, with dots, and their values as TensorBoard knows them."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _hparams(value, f"{prefix}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{key}", value
        elif value:
            yield f"{prefix}{key}", json.dumps(value)
