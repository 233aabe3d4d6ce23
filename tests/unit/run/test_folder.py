from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Config, read_yaml
from paceline.errors import ConfigError
from paceline.run import folder
from paceline.run.folder import RunFolder, opened, write_json, write_private, write_text

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

    monkeypatch.setattr(folder, "datetime", Clock)
    names = [RunFolder.create(make_config()).path.name for _ in range(3)]
    assert names == ["2024-05-06_07-08-09", "2024-05-06_07-08-09-2", "2024-05-06_07-08-09-3"]


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run", seed=1))
    before = folder.config.read_text()
    with pytest.raises(ConfigError, match="run_dir=run already holds a run; continue it by --resume auto"):
        RunFolder.create(make_config(run_dir="run", seed=2))
    assert folder.config.read_text() == before


def test_a_refused_folder_of_train_fn_names_what_can_be_done(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run", train_fn=lambda *arguments: None, loss_fn=None)
    folder = RunFolder.create(config)
    with pytest.raises(ConfigError, match="already holds a run; start it again by --resume auto, choose another"):
        RunFolder.create(config)
    folder.result.write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run; choose another folder or remove it"):
        RunFolder.create(config)


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


# --- one process at a time --------------------------------------------------------------------------------------------


def test_a_run_is_trained_by_one_process_at_a_time(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    assert not folder.is_locked()
    with folder.locked():
        assert folder.is_locked()
        text = f"{folder.path} is being trained by another process; wait for it"
        with pytest.raises(ConfigError, match=text), RunFolder(folder.path).locked():
            pytest.fail("two at a time")
        assert folder.is_locked()  # the attempt has not let go of it
    assert not folder.is_locked()
    with folder.locked():  # and again
        pass


def test_a_run_whose_process_was_killed_can_go_on(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert folder.is_locked()
        process.kill()
        process.wait(20)
    assert not folder.is_locked()


ASKING = """
import sys, threading
from pathlib import Path
from paceline.run.folder import RunFolder

folder, ended = RunFolder(Path(sys.argv[1])), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
print("up", flush=True)
print(sum(folder.is_locked() for _ in range(3000)), flush=True)
while not ended.is_set():
    folder.is_locked()
"""


def test_processes_that_ask_disturb_neither_each_other_nor_a_start(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    with folder.locked():
        pass  # from now on there is a file to ask
    command = [sys.executable, "-c", ASKING, str(folder.path)]
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        asking = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for text in ("up\n", "0\n"):  # both ask at once, and neither finds the run locked
            assert [process.stdout.readline() for process in asking if process.stdout is not None] == [text, text]
        for _ in range(2000):
            with folder.locked():
                pass
    assert [process.returncode for process in asking] == [0, 0]


def test_a_child_of_the_training_process_does_not_keep_the_run_locked(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    with folder.locked():
        command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    assert not folder.is_locked()
    child.communicate(timeout=20)


def test_a_file_system_without_locks_is_no_hindrance(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    folder = RunFolder.create(make_config(run_dir="run"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder.locked():
        assert not folder.is_locked()


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system, which root meets, too."""
    plain = Path.open

    def open_to_read(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode != "r":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return plain(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_to_read)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)


def test_a_run_that_is_read_only_cannot_go_on_and_is_not_locked(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    with folder.locked():
        pass
    refuse_writing(monkeypatch)
    said = f"{folder.path} cannot be written to: Read-only file system; go on with a copy of it, or begin a new run"
    with pytest.raises(ConfigError, match=said), opened(make_config(), folder.path):
        pytest.fail("it cannot be locked")
    assert not folder.is_locked()


def test_a_lock_in_a_read_only_folder_is_seen(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    with folder.locked():
        refuse_writing(monkeypatch)
        assert folder.is_locked()


def test_the_lock_is_free_again_after_an_error(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run")
    with pytest.raises(ZeroDivisionError), opened(config, None):
        raise ZeroDivisionError
    assert not RunFolder(Path("run")).is_locked()


# --- a run that goes on -----------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_keeps_its_folder_and_takes_the_config_of_now(make_config: MakeConfig) -> None:
    with opened(make_config(run_dir="run", num_epochs=1), None) as folder:
        folder.result.write_text("{}")
        folder.checkpoints.mkdir()
        folder.events.write_text("said\n")
    with opened(make_config(num_epochs=5), folder.path) as again:
        assert again.path == folder.path
        assert again.result.exists()  # until it is sure that the config fits
        again.reopen(make_config(num_epochs=5))
        assert read_yaml(again.config)["num_epochs"] == 5
        assert not again.result.exists()  # or it would be taken for that of this life
        assert again.checkpoints.is_dir()
        assert again.events.read_text() == "said\n"


def test_a_run_that_is_being_trained_is_not_touched(make_config: MakeConfig) -> None:
    with opened(make_config(run_dir="run", seed=1), None) as folder:
        folder.result.write_text("{}")
        before = folder.config.read_text()
        with pytest.raises(ConfigError, match="is being trained"), opened(make_config(seed=2), folder.path):
            pytest.fail("two at a time")
        assert folder.config.read_text() == before
        assert folder.result.exists()


def test_a_folder_without_logs_is_made_ready(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    folder.logs.rmdir()
    with opened(make_config(), folder.path):
        assert folder.logs.is_dir()


def test_how_the_last_life_ended_is_forgotten_and_its_logs_are_kept(make_config: MakeConfig) -> None:
    folder = RunFolder.create(make_config(run_dir="run"))
    for path in (folder.stopped, folder.failure(0), folder.failure(12), folder.log(0), folder.log(12)):
        path.write_text("{}")
    folder.forget_last_life()
    assert sorted(folder.logs.iterdir()) == [folder.log(0), folder.log(12)]
    folder.forget_last_life()  # nothing there


def test_text_is_whole_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_text(path, "a longer text")
    write_text(path, "größe")
    assert path.read_text(encoding="utf-8") == "größe"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), lambda path: write_private(path, b"x")])
def test_a_file_is_on_the_disk_before_it_has_its_name(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power must not leave an empty file with a name."""
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


def test_a_folder_that_was_moved_away_is_not_created_again_by_a_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "gone" / "file", "x")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(("content", "is_result"), [(None, False), ("", False), ('{"step', False), ("{}", True)])
def test_a_run_has_finished_when_its_result_can_be_read(tmp_path: Path, content: str | None, is_result: bool) -> None:
    folder = RunFolder(tmp_path)
    if content is not None:
        folder.result.write_text(content)
    assert folder.has_result() == is_result


def test_a_folder_with_checkpoints_and_no_config_is_not_taken_for_a_new_run(make_config: MakeConfig) -> None:
    Path("run/checkpoints/step-00000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run_dir=run already holds a run"):
        RunFolder.create(make_config(run_dir="run"))


def test_a_start_that_is_refused_does_not_leave_its_config(make_config: MakeConfig) -> None:
    with opened(make_config(run_dir="run", seed=1), None) as folder:
        folder.config.unlink()  # as if the other start had not written it yet
        other = opened(make_config(run_dir="run", seed=2), None)
        with pytest.raises(ConfigError, match="is being trained by another process"), other:
            pass
        assert not folder.config.exists()
