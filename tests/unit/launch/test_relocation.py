"""A run folder that is moved or deleted during the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.config import Config, read_yaml
from paceline.launch.relocation import FolderWatcher
from paceline.observe.events import Events
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from paceline.run.lock import is_locked
from support.runs import create_run, warnings_in

MakeConfig = Callable[..., Config]


@pytest.fixture
def held(make_config: MakeConfig) -> Iterator[tuple[RunFolder, FolderWatcher]]:
    """A run folder that this process has locked, and a watcher whose thread never checks it: the test does."""
    config = make_config(run_dir="runs/mine", seed=7)
    with open_run(config, None) as folder:
        with closing(Events(folder.events)) as events:
            events.write("before")
        watcher = FolderWatcher(folder, config)
        watcher._ended.set()
        with watcher:
            yield folder, watcher


def test_a_folder_in_its_place_is_left_alone(held: tuple[RunFolder, FolderWatcher]) -> None:
    folder, watcher = held
    before = sorted(folder.path.rglob("*"))
    watcher.check()
    assert sorted(folder.path.rglob("*")) == before
    assert warnings_in(folder.path) == []


@pytest.mark.parametrize("is_moved", [True, False])
def test_another_folder_in_its_place_is_left_alone_and_ends_the_run(
    held: tuple[RunFolder, FolderWatcher], tmp_path: Path, is_moved: bool
) -> None:
    folder, watcher = held
    folder.path.rename("moved")
    if not is_moved:
        shutil.rmtree("moved")
    folder.path.mkdir()
    (folder.path / "config.yaml").write_text("of another run")
    watcher.check()
    fate, rest = "deleted", ""
    if is_moved:
        fate, rest = f"moved to {tmp_path}/moved", f"; resume with --resume {tmp_path}/moved"
    assert watcher.conflict == (
        f"{folder.path} was {fate} while its run was training, and another file or folder is in its place{rest}"
    )
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]
    assert folder.config.read_text() == "of another run"


def test_a_link_of_the_user_in_the_old_place_is_left_alone(held: tuple[RunFolder, FolderWatcher]) -> None:
    folder, watcher = held
    folder.path.rename("moved")
    Path("other").mkdir()
    (Path("other") / "data").touch()
    folder.path.symlink_to(Path("other").resolve())
    watcher.check()
    assert watcher.conflict is not None
    assert folder.path.resolve() == Path("other").resolve()


@pytest.mark.parametrize(
    ("source", "target", "place"),
    [("runs/mine", "runs/yours", "runs/yours"), ("runs/mine", "elsewhere", "elsewhere"), ("runs", "old", "old/mine")],
)
def test_a_folder_that_was_moved_is_reached_by_its_old_path(
    held: tuple[RunFolder, FolderWatcher], tmp_path: Path, source: str, target: str, place: str
) -> None:
    folder, watcher = held
    Path(source).rename(target)
    watcher.check()
    assert folder.path.resolve() == tmp_path / place
    assert is_locked(folder)
    assert is_locked(RunFolder(tmp_path / place))
    text = f"{folder.path} was moved to {tmp_path / place}; the run continues there, through a link in the old place"
    assert warnings_in(folder.path) == [text]
    watcher.check()
    assert warnings_in(folder.path) == [text]


def test_a_folder_that_is_moved_again_and_again_is_followed(
    held: tuple[RunFolder, FolderWatcher], tmp_path: Path
) -> None:
    folder, watcher = held
    for before, after in (("runs/mine", "a"), ("a", "b"), ("b", "c")):
        Path(before).rename(after)
        watcher.check()
    assert folder.path.resolve() == tmp_path / "c"
    folder.path.unlink()  # the link
    Path("c").rename("runs/mine")
    watcher.check()
    assert not folder.path.is_symlink()
    assert len(warnings_in(folder.path)) == 3


def test_a_folder_that_was_deleted_is_created_with_its_config_and_locked(
    held: tuple[RunFolder, FolderWatcher],
) -> None:
    folder, watcher = held
    for _ in range(2):
        shutil.rmtree(folder.path)
        watcher.check()
        assert read_yaml(folder.config)["seed"] == 7
        assert is_locked(folder)
        assert folder.logs.is_dir()
        [text] = warnings_in(folder.path)
        assert text.startswith(f"{folder.path} was deleted; the run continues in a new folder, without")


def test_a_config_that_was_deleted_is_written_again(held: tuple[RunFolder, FolderWatcher], tmp_path: Path) -> None:
    """`rm -r` leaves the folder if a rank writes to it meanwhile."""
    folder, watcher = held
    folder.path.rename("moved")
    watcher.check()
    for path in (folder.config, folder.lock):
        path.unlink()
    for _ in range(2):
        watcher.check()
        assert read_yaml(tmp_path / "moved" / "config.yaml")["seed"] == 7
        assert is_locked(folder)
        assert warnings_in(folder.path)[1:] == [f"{folder.config} was deleted and has been written again"]


def test_a_config_that_was_not_there_before_is_left_to_the_ranks(make_config: MakeConfig) -> None:
    """They may still refuse to resume the run."""
    config = make_config(run_dir="run")
    folder = create_run(config)
    folder.config.unlink()
    with open_run(config, folder.path), FolderWatcher(folder, config) as watcher:
        watcher.check()
    assert not folder.config.exists()
    assert not folder.events.exists()


def test_where_a_link_cannot_be_made_the_run_continues_in_a_new_folder(
    held: tuple[RunFolder, FolderWatcher], tmp_path: Path
) -> None:
    folder, watcher = held
    folder.path.rename("moved")
    folder.path.mkdir()  # something else has the path
    watcher.check()
    assert folder.config.exists()
    [text] = warnings_in(folder.path)
    assert f"was moved to {tmp_path / 'moved'}; the run continues in a new folder, without the earlier" in text


def test_a_watcher_has_a_thread_that_checks(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run")
    with open_run(config, None) as folder, FolderWatcher(folder, config):
        folder.path.rename("moved")
        while not folder.path.exists():
            pass
    assert folder.path.resolve().name == "moved"
    assert not is_locked(folder)
