"""sinks/tensorboard.py, checked with TensorBoard's own reader."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS

from paceline.observe.events import Events, rewind
from paceline.observe.sinks.sink import SinkFeeder
from paceline.observe.sinks.tensorboard import TensorBoardSink


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    add(path, range(1, 4))
    return path


def add(path: Path, steps: range, scale: float = 1.0) -> None:
    writer = Events(path)
    for step in steps:
        writer.write("step", step=step, steps=9, epoch=1, epochs=1, loss=scale / step, lr=0.1, samples_per_s=5)
    writer.close()


def finish(path: Path, config: dict[str, Any]) -> None:
    writer = Events(path)
    writer.write("run_finished", step=3, epoch=1, metrics={}, config=config)
    writer.close()


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(scalar.step, scalar.value) for scalar in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def test_numbers_of_steps_and_epochs_are_visible_at_once(events: Path, tmp_path: Path) -> None:
    feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
    feeder.deliver()
    assert losses(tmp_path / "tensorboard") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    writer = Events(events)
    writer.write("epoch", epoch=1, step=3, train_loss=0.6, val_loss=0.7, accuracy=1.0)
    writer.write("epoch", epoch=2, step=6, train_loss=None, val_loss=0.5, accuracy=1.0)
    writer.write("warning", text="not plotted", step=3)
    writer.close()
    feeder.deliver()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == [
        "accuracy", "epoch", "loss", "lr", "samples_per_s", "train_loss", "val_loss",
    ]  # fmt: skip
    assert [scalar.step for scalar in read.Scalars("train_loss")] == [3]
    feeder.sink.close()


def test_each_rank_has_its_own_plot(events: Path, tmp_path: Path) -> None:
    writer = Events(events)
    writer.write("step", step=4, loss=0.1, grad_norm=None, step_ms=[2.5, 3.5], memory_mb=[64.0, 32.0])
    writer.write("step", step=5, loss=0.1, grad_norm=0.75, step_ms=[2.0, 3.0], memory_mb=[64.0, 32.0])
    writer.close()
    feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
    feeder.deliver()
    feeder.sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("grad_norm")] == [(5, 0.75)]
    assert [scalar.value for scalar in read.Scalars("step_ms/rank-1")] == [3.5, 3.0]
    assert [scalar.value for scalar in read.Scalars("memory_mb/rank-0")] == [64.0, 64.0]


def test_a_finished_run_has_its_config_in_the_hparams_tab(events: Path, tmp_path: Path) -> None:
    """Once, with the last config: a finished run was extended."""
    finish(events, {"batch_size": 32, "optimizer": {"lr": 0.1}})
    writer = Events(events)
    writer.write("run_started")
    writer.close()
    add(events, range(4, 6))
    optimizer = {"name": "sgd", "lr": 0.5, "betas": [0.5, 0.9], "momentum": None}
    finish(events, {"batch_size": 64, "exact": True, "optimizer": optimizer, "model_args": {}, "metrics": []})
    feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
    feeder.deliver()
    feeder.sink.close()
    content = EventAccumulator(str(tmp_path / "tensorboard")).Reload().PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()} == {
        "batch_size": 64.0,
        "exact": True,
        "optimizer.betas": "[0.5, 0.9]",
        "optimizer.lr": 0.5,
        "optimizer.name": "sgd",
    }
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert end.status == STATUS_SUCCESS


@pytest.mark.parametrize("last", ["run_started", "run_stopped"])
def test_a_run_that_has_not_finished_is_not_in_the_hparams_tab(events: Path, tmp_path: Path, last: str) -> None:
    if last == "run_started":
        finish(events, {"batch_size": 32})
    writer = Events(events)
    writer.write(last, step=3)
    writer.close()
    feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
    feeder.deliver()
    feeder.sink.close()
    with pytest.raises(KeyError):
        EventAccumulator(str(tmp_path / "tensorboard")).Reload().PluginTagToContent("hparams")


def test_steps_that_are_repeated_after_a_resume_are_in_the_file_once(events: Path, tmp_path: Path) -> None:
    feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
    feeder.deliver()
    rewind(events, 1)
    add(events, range(2, 5), scale=2.0)
    feeder.deliver()
    assert losses(tmp_path / "tensorboard") == [(1, 1.0), (2, 1.0), (3, pytest.approx(2 / 3)), (4, 0.5)]
    feeder.sink.close()


def test_a_later_attempt_replaces_its_own_file_and_no_other(events: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.1.of-the-user").write_bytes(b"")
    for _ in range(2):
        feeder = SinkFeeder(events, TensorBoardSink(tmp_path))
        feeder.deliver()
        feeder.sink.close()
    assert len(list(folder.iterdir())) == 2
    assert [step for step, _ in losses(folder)] == [1, 2, 3]


def test_without_numbers_there_is_no_file(tmp_path: Path) -> None:
    feeder = SinkFeeder(tmp_path / "events.jsonl", TensorBoardSink(tmp_path))
    feeder.deliver()
    feeder.sink.close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_file_that_was_lost_to_a_full_disk_is_written_again(events: Path, tmp_path: Path) -> None:
    class Full:
        def write(self, *record: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = close = write

    sink = TensorBoardSink(tmp_path)
    feeder = SinkFeeder(events, sink)
    sink._writer = Full()
    feeder.deliver()  # creates a new file: nothing is lost
    sink.close()
    sink._writer = Full()
    add(events, range(4, 6))
    with pytest.raises(OSError, match="No space left"):
        feeder.deliver()
    feeder.start_over()
    feeder.deliver()  # there is free space again
    assert [step for step, _ in losses(tmp_path / "tensorboard")] == [1, 2, 3, 4, 5]
    sink.close()
    sink._writer = Full()
    sink.close()
