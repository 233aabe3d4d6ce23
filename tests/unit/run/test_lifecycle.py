from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from paceline.config import Config, read_yaml
from paceline.errors import ConfigError
from paceline.run import lifecycle
from paceline.run.lifecycle import clear_last_attempt, open_run, reopen
from support.runs import create_run

MakeConfig = Callable[..., Config]


def test_run_dir_names_the_folder_exactly(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = create_run(make_config(run_dir="deep/down/run-1"))
    assert folder.path == tmp_path / "deep" / "down" / "run-1"
    assert folder.logs.is_dir()


def test_a_run_folder_has_the_resolved_config(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run", seed=12, optimizer={"name": "sgd", "lr": 0.5})
    assert create_run(config).config.read_text(encoding="utf-8") == config.to_yaml()
    assert read_yaml(Path("run/config.yaml"))["seed"] == 12


def test_by_default_a_run_has_a_dated_folder_under_its_name(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = create_run(make_config(name="digits"))
    assert folder.path.parent == tmp_path / "runs" / "digits"
    datetime.strptime(folder.path.name, "%Y-%m-%d_%H-%M-%S")


def test_runs_started_in_the_same_second_get_different_folders(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        @staticmethod
        def now() -> datetime:
            return datetime(2024, 5, 6, 7, 8, 9)

    monkeypatch.setattr(lifecycle, "datetime", Clock)
    names = [create_run(make_config()).path.name for _ in range(3)]
    assert names == ["2024-05-06_07-08-09", "2024-05-06_07-08-09-2", "2024-05-06_07-08-09-3"]


def test_a_folder_that_holds_a_run_is_refused_and_not_changed(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run", seed=1))
    before = folder.config.read_text()
    with pytest.raises(ConfigError, match="run_dir=run already contains a run; resume it with --resume auto"):
        create_run(make_config(run_dir="run", seed=2))
    assert folder.config.read_text() == before


def test_the_error_for_a_folder_of_train_fn_says_what_to_do(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run", train_fn=lambda *arguments: None, loss_fn=None)
    folder = create_run(config)
    with pytest.raises(ConfigError, match="already contains a run; start it again with --resume auto, choose another"):
        create_run(config)
    folder.result.write_text("{}")
    with pytest.raises(ConfigError, match="already contains a run; choose another folder or remove it"):
        create_run(config)


def test_a_folder_with_other_files_is_accepted(make_config: MakeConfig) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    create_run(make_config(run_dir="run"))
    assert Path("run/notes.txt").read_text() == "mine"


def test_a_file_at_run_dir_is_a_config_error(make_config: MakeConfig) -> None:
    Path("run").write_text("not a folder")
    with pytest.raises(ConfigError, match="run_dir=run"):
        create_run(make_config(run_dir="run"))


def test_a_resumed_run_keeps_its_folder_and_gets_the_new_config(make_config: MakeConfig) -> None:
    with open_run(make_config(run_dir="run", num_epochs=1), None) as folder:
        folder.result.write_text("{}")
        folder.checkpoints.mkdir()
        folder.events.write_text("event\n")
    with open_run(make_config(num_epochs=5), folder.path) as again:
        assert again.path == folder.path
        assert again.result.exists()  # until the config is known to fit
        reopen(again, make_config(num_epochs=5))
        assert read_yaml(again.config)["num_epochs"] == 5
        assert not again.result.exists()  # it would look like the result of this attempt
        assert again.checkpoints.is_dir()
        assert again.events.read_text() == "event\n"


def test_a_run_that_is_being_trained_is_not_changed(make_config: MakeConfig) -> None:
    with open_run(make_config(run_dir="run", seed=1), None) as folder:
        folder.result.write_text("{}")
        before = folder.config.read_text()
        with pytest.raises(ConfigError, match="is being trained"), open_run(make_config(seed=2), folder.path):
            pytest.fail("two processes hold the lock")
        assert folder.config.read_text() == before
        assert folder.result.exists()


def test_a_missing_folder_of_logs_is_created(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    folder.logs.rmdir()
    with open_run(make_config(), folder.path):
        assert folder.logs.is_dir()


def test_records_of_the_last_attempt_are_removed_and_its_logs_are_kept(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    for path in (folder.stopped, folder.failure(0), folder.failure(12), folder.log(0), folder.log(12)):
        path.write_text("{}")
    clear_last_attempt(folder)
    assert sorted(folder.logs.iterdir()) == [folder.log(0), folder.log(12)]
    clear_last_attempt(folder)  # with nothing to remove


def test_a_folder_with_checkpoints_and_no_config_is_refused_for_a_new_run(make_config: MakeConfig) -> None:
    Path("run/checkpoints/step-00000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run_dir=run already contains a run"):
        create_run(make_config(run_dir="run"))


def test_a_refused_start_does_not_leave_its_config(make_config: MakeConfig) -> None:
    with open_run(make_config(run_dir="run", seed=1), None) as folder:
        folder.config.unlink()  # as if the other start had not written it yet
        other = open_run(make_config(run_dir="run", seed=2), None)
        with pytest.raises(ConfigError, match="is being trained by another process"), other:
            pass
        assert not folder.config.exists()
