"""Writes the numbers in `events.jsonl` as a file for TensorBoard.

The file is written again in each attempt of a run and whenever events are removed, so it contains each step once. When
a run has finished, its config is added at the end, for the tab HParams.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import dotted_items
from paceline.observe.event_types import Event
from paceline.observe.images import size_of_png
from paceline.observe.sinks.sink import PLOTTED, Sink, numbers_in
from paceline.run.layout import RunFolder


class TensorBoardSink(Sink):
    """A sink that creates its file when the first number is written."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._folder = RunFolder(run_dir).tensorboard
        self._writer: Any = None
        self._finished: Event | None = None  # the `run_finished` event, if the run has finished

    def restart(self) -> None:
        """Delete the files of earlier attempts."""
        self._finished = None
        self.close()
        for path in self._folder.glob("events.out.tfevents.*.paceline"):
            path.unlink()

    def write(self, event: Event) -> None:
        """Write the numbers that are plotted; remember whether the run has finished."""
        if event["event"] in PLOTTED:
            self._plot(event)
        elif event["event"] == "image":
            self._write_image(event)
        elif event["event"] == "histogram":
            self._write_histogram(event)
        elif event["event"] in ("run_started", "run_finished"):
            self._finished = event if event["event"] == "run_finished" else None

    def flush(self) -> None:
        """Make the numbers visible to TensorBoard."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Complete the file."""
        if self._writer is not None:
            with suppress(OSError):  # the disk is full
                self._end_file()
        self._writer = None

    def _end_file(self) -> None:
        # Only at the end: a finished run may be extended, and TensorBoard keeps the first hyper-parameters it reads.
        if self._finished is not None and "config" in self._finished:
            self._write_hparams(self._finished)
        self._writer.close()

    def _plot(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers_in(event)]
        self._write(Record(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def _write_image(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        with suppress(OSError, struct.error):  # it was removed, or it is incomplete
            png = (self.run_dir / event["file"]).read_bytes()
            height, width, channels = size_of_png(png)
            image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
            summary = Summary(value=[Summary.Value(tag=event["name"], image=image)])
            self._write(Record(wall_time=event["time"], step=event["step"], summary=summary))

    def _write_histogram(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        edges, counts = event["edges"], event["counts"]
        histogram = HistogramProto(
            min=edges[0], max=edges[-1], num=sum(counts), sum=event["sum"], sum_squares=event["sum_squares"],
            bucket_limit=edges[1:], bucket=counts,
        )  # fmt: skip
        summary = Summary(value=[Summary.Value(tag=event["name"], histo=histogram)])
        self._write(Record(wall_time=event["time"], step=event["step"], summary=summary))

    def _write_hparams(self, finished: Event) -> None:
        """Write the config as hyper-parameters; the tab shows the last value of each plotted number beside them."""
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
