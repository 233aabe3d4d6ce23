"""TensorBoard: the numbers in `events.jsonl` as a file that TensorBoard reads.

The file is made anew in each life of a run and whenever the events are taken back, so it holds each step once. A run
that has finished ends it with its config, for the tab HParams.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import dotted_items
from paceline.observe.event_types import Event
from paceline.observe.sinks.sink import PLOTTED, numbers_in


class Board:
    """A sink that opens its file with the first number there is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._finished: Event | None = None  # how the run has ended, if it has

    def restart(self) -> None:
        """Begin the file anew."""
        self._finished = None
        self.close()
        for path in self._folder.glob("events.out.tfevents.*.paceline"):
            path.unlink()

    def take(self, event: Event) -> None:
        """Write what is plotted; remember how the run has ended."""
        if event["event"] in PLOTTED:
            self._plot(event)
        elif event["event"] in ("run_started", "run_finished"):
            self._finished = event if event["event"] == "run_finished" else None

    def flush(self) -> None:
        """Let TensorBoard see it."""
        if self._writer is not None:
            self._writer.flush()

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

    def _plot(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers_in(event)]
        self._write(Record(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def _write_hparams(self, finished: Event) -> None:
        """The config as hyper-parameters; the tab takes the last values of everything plotted as metrics."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

        start = SessionStartInfo()
        for name, value in dotted_items(finished["config"]):
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
            self._write(Record(wall_time=finished["time"], summary=Summary(value=[value])))

    def _write(self, record: Any) -> None:
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event as Record
            from tensorboard.summary.writer.record_writer import RecordWriter

            self._folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.paceline"
            self._writer = RecordWriter((self._folder / name).open("wb"))
            self._writer.write(Record(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writer.write(record.SerializeToString())
