from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.run.atomic_files import write_json, write_private, write_text


def test_private_files_are_atomic_and_readable_only_by_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    write_private(path, b"first, and longer")
    write_private(path, b"second")
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_atomic_and_replaces_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2, "name": "größe"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"step": 2, "name": "größe"}
    assert list(tmp_path.iterdir()) == [path]


def test_json_that_cannot_be_written_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}


def test_text_is_atomic_and_replaces_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_text(path, "a longer text")
    write_text(path, "größe")
    assert path.read_text(encoding="utf-8") == "größe"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), lambda path: write_private(path, b"x")])
def test_a_file_is_flushed_to_the_disk_before_it_is_renamed(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a file with its final name must not be empty."""
    fsync, replace, calls = os.fsync, Path.replace, list[str]()

    def note_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} byte")
        fsync(handle)

    def note_replace(path: Path, target: Path) -> Path:
        calls.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write(tmp_path / "file")
    assert calls == ["1 byte", "name", "folder"]


def test_writing_a_file_does_not_create_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "missing" / "file", "x")
    assert not (tmp_path / "missing").exists()
