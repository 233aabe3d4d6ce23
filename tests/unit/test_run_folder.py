from __future__ import annotations

import json
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from paceline import run_folder
from paceline.config import Config, read_yaml
from paceline.errors import ConfigError
from paceline.run_folder import RunFolder, write_json, write_private

MakeConfig = Callable[..., Config]


def test_run_dir_names_the_folder_exactly(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = RunFolder.create(make_config(run_dir="deep/down/run-1"))
    assert folder.path == tmp_path / "deep" / "down" / "run-1"
    assert folder.logs.is_dir()


def test_a_folder_holds_the_config_as_resolved(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run", seed=12, optimizer={"name": "sgd", "lr": 0.5})
    assert RunFolder.create(config).config.read_text(encoding="utf-8") == config.to_yaml()
    assert read_yaml(Path("run/config.yaml"))["seed"] == 12


def test_by_default_a_run_has_a_dated_folder_under_its_name(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = RunFolder.create(make_config(name="digits"))
    assert folder.path.parent == tmp_path / "runs" / "digits"
    datetime.strptime(folder.path.name, "%Y-%m-%d_%H-%M-%S")


def test_runs_of_the_same_second_get_folders_of_their_own(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        @staticmethod
        def now() -> datetime:
            return datetime(2024, 5, 6, 7, 8, 9)

    monkeypatch.setattr(run_folder, "datetime", Clock)
    names = [RunFolder.create(make_config()).path.name for _ in range(3)]
    assert names == ["2024-05-06_07-08-09", "2024-05-06_07-08-09-2", "2024-05-06_07-08-09-3"]


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run", seed=1))
    before = folder.config.read_text()
    with pytest.raises(ConfigError, match="run_dir=run already holds a run; go on with it by --resume auto"):
        RunFolder.create(make_config(run_dir="run", seed=2))
    assert folder.config.read_text() == before


def test_a_folder_with_other_things_in_it_is_taken(make_config: MakeConfig) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    RunFolder.create(make_config(run_dir="run"))
    assert Path("run/notes.txt").read_text() == "mine"


def test_a_file_where_the_folder_should_be_is_a_config_error(make_config: MakeConfig) -> None:
    Path("run").write_text("not a folder")
    with pytest.raises(ConfigError, match="run_dir=run"):
        RunFolder.create(make_config(run_dir="run"))


def test_every_rank_has_a_log_and_a_failure_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.log(3) == tmp_path / "logs" / "rank-3.log"
    names = {folder.log(0), folder.log(1), folder.failure(0), folder.failure(1), folder.log("${local_rank}")}
    assert len(names) == 5


def test_private_files_are_whole_and_only_for_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    write_private(path, b"first, and longer")
    write_private(path, b"second")
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_whole_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2, "name": "größe"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"step": 2, "name": "größe"}
    assert list(tmp_path.iterdir()) == [path]


def test_json_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}
