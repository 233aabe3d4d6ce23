"""telemetry/board.py, judged by TensorBoard's own reader."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.telemetry.board import Board
from paceline.telemetry.events import Events, rewind


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    add(path, range(1, 4))
    return path


def add(path: Path, steps: range, scale: float = 1.0) -> None:
    writer = Events(path)
    for step in steps:
        writer.write("step", step=step, steps=9, epoch=0, epochs=1, loss=scale / step, lr=0.1, samples_per_s=5)
    writer.close()


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(scalar.step, scalar.value) for scalar in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def test_numbers_of_steps_and_epochs_are_there_as_soon_as_they_are_told(events: Path, tmp_path: Path) -> None:
    board = Board(events, tmp_path / "board")
    board.look()
    assert losses(tmp_path / "board") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    writer = Events(events)
    writer.write("epoch", epoch=0, step=3, train_loss=0.6, val_loss=0.7, accuracy=1.0)
    writer.write("epoch", epoch=1, step=6, train_loss=None, val_loss=0.5, accuracy=1.0)
    writer.write("warning", text="not for here", step=3)
    writer.close()
    board.look()
    read = EventAccumulator(str(tmp_path / "board")).Reload()
    assert sorted(read.Tags()["scalars"]) == [
        "accuracy", "epoch", "loss", "lr", "samples_per_s", "train_loss", "val_loss",
    ]  # fmt: skip
    assert [scalar.step for scalar in read.Scalars("train_loss")] == [3]
    board.close()


def test_steps_that_are_taken_back_are_there_once(events: Path, tmp_path: Path) -> None:
    board = Board(events, tmp_path / "board")
    board.look()
    rewind(events, 1)
    add(events, range(2, 5), scale=2.0)
    board.look()
    assert losses(tmp_path / "board") == [(1, 1.0), (2, 1.0), (3, pytest.approx(2 / 3)), (4, 0.5)]
    board.close()


def test_a_later_life_begins_the_file_anew_and_leaves_others_alone(events: Path, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    folder.mkdir()
    (folder / "events.out.tfevents.1.of-the-user").write_bytes(b"")
    for _ in range(2):
        board = Board(events, folder)
        board.look()
        board.close()
    assert len(list(folder.iterdir())) == 2
    assert [step for step, _ in losses(folder)] == [1, 2, 3]


def test_without_numbers_there_is_no_file(tmp_path: Path) -> None:
    board = Board(tmp_path / "events.jsonl", tmp_path / "board")
    board.look()
    board.close()
    assert not (tmp_path / "board").exists()


def test_a_full_disk_costs_the_file_and_nothing_else(events: Path, tmp_path: Path) -> None:
    class Full:
        def write(self, *record: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = close = write

    board = Board(events, tmp_path / "board")
    board._writer = Full()
    board.look()  # a new file: nothing is lost
    board.close()
    board._writer = Full()
    add(events, range(4, 6))
    board.look()
    board.look()  # there is room again: the file is made anew
    assert [step for step, _ in losses(tmp_path / "board")] == [1, 2, 3, 4, 5]
    board.close()
    board._writer = Full()
    board.close()
