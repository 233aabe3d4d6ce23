"""hub/cache.py: tensors are computed once, again when their inputs change, and never read incomplete."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import cached_tensors
from paceline.errors import DataError
from paceline.hub import cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def make() -> Callable[[], dict[str, torch.Tensor]]:
    """A function whose tensors include the number of its calls."""
    calls = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(None)
        return {"calls": torch.tensor(len(calls)), "rows": torch.arange(6).reshape(2, 3).t(), "none": torch.empty(0)}

    return make


def test_later_calls_read_the_stored_tensors(make, home: Path) -> None:
    for _ in range(2):
        tensors = cached_tensors("things", make, "a", 1)
        assert tensors["calls"] == 1
        assert tensors["rows"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert tensors["none"].shape == (0,)
    [path] = home.glob("cache/*.safetensors")
    assert path.name.startswith("things-")


def test_tensors_are_computed_again_when_an_input_changes(make, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("1")
    folder.mkdir()
    (folder / "a").write_text("1")

    def calls(number: float = 0.5) -> int:
        return int(cached_tensors("things", make, file, [folder, "words"], {"number": number})["calls"])

    assert calls() == 1
    file.write_text("2")
    assert calls() == 2
    (folder / "a").rename(folder / "b")
    assert calls() == 3
    assert calls(0.25) == 4
    file.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(file)
    assert calls() == 3
    with pytest.raises(TypeError, match="inputs are paths, numbers, text, and lists and dicts of them; got"):
        cached_tensors("things", make, object())


def test_the_partial_file_of_a_killed_process_is_not_used_and_is_removed(make, home: Path, monkeypatch) -> None:
    def write_half(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_tensors", write_half)
        with pytest.raises(KeyboardInterrupt):
            cached_tensors("things", make, 1)
    [left] = home.glob("cache/*.partial")
    left.rename(f"{left.with_suffix('')}0.partial")  # as if by another process
    assert not list(home.glob("cache/*.safetensors"))
    assert cached_tensors("things", make, 1)["calls"] == 2
    assert {path.suffix for path in home.glob("cache/*")} == {".lock", ".safetensors"}


def test_an_error_of_the_users_function_is_raised_and_leaves_no_file(make, home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cached_tensors("things", lambda: Path("gone").read_bytes(), 1)
    assert cached_tensors("things", make, 1)["calls"] == 1


def test_other_processes_wait_and_report_that_they_wait(make, home: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cache, "REPORT_EVERY_S", 0.0)
    has_started, may_finish = threading.Event(), threading.Event()
    seen: list[int] = []

    def make_slowly() -> dict[str, torch.Tensor]:
        has_started.set()
        may_finish.wait()
        return make()

    def call(function: Callable[[], dict[str, torch.Tensor]]) -> None:
        seen.append(int(cached_tensors("things", function, 1)["calls"]))

    threads = [threading.Thread(target=call, args=[function], daemon=True) for function in (make_slowly, make)]
    threads[0].start()
    has_started.wait()
    threads[1].start()
    while "things: waiting for another process to prepare it (0 s)" not in capsys.readouterr().out:
        assert threads[1].is_alive()
    may_finish.set()
    for thread in threads:
        thread.join()
    assert seen == [1, 1]


def test_a_file_system_without_locks_can_be_used(make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cached_tensors("things", make, 1)["calls"] == 1


def test_a_home_that_cannot_be_written_to_is_named(make, home: Path) -> None:
    home.write_text("")
    with pytest.raises(DataError, match=f"{home}/cache cannot be written to: Not a directory; set PACELINE_HOME to"):
        cached_tensors("things", make, 1)
