"""checkpoint/saver.py in a world of one, or of two that are played in turn; the writer's thread is a real one."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.checkpoint import saver as saver_module
from paceline.checkpoint.files import load
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture
from paceline.checkpoint.store import Store, step_of, verify
from paceline.config import Checkpoint
from paceline.observe.events import Events, read

WAIT_S = 20


class Alone:
    """A world of one rank without a process group."""

    rank, size, is_main = 0, 1, True

    def decide(self, choose: Callable[[], Any]) -> Any:
        return choose()

    def gather_objects(self, thing: Any) -> list[Any]:
        return [thing]


class Run:
    """A model, and a saver with its events."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.store, self._events = Store(path / "checkpoints"), path / "events.jsonl"
        options = {"every_minutes": None, **options}
        self.writer = Events(self._events)
        world: Any = Alone()
        self.saver = Saver(self.store, Checkpoint(**options), {"lanes": 1}, world, self.writer)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def state(self) -> CheckpointState:
        return capture(self.model, self.optimizer, None, {})

    def set_weights(self, value: float) -> None:
        nn.init.constant_(self.model.weight, value)

    def save(self, step: int, **metrics: float) -> None:
        self.saver.start(step, self.state(), metrics)
        self.saver.finish()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read(self._events) if event["event"] == kind]

    def steps(self) -> list[int]:
        return [verify(path).step for path in self.store.paths()]

    def hidden(self) -> list[str]:
        return [path.name for path in self.store.folder.glob(".*")]


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    with ExitStack() as stack:

        def make(**options: Any) -> Run:
            run = Run(tmp_path, **options)
            stack.callback(run.writer.close)
            return run

        yield make


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return make_run()


@contextmanager
def held(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk does not answer inside, until the event is set."""
    release, write_values = threading.Event(), saver_module.write_values

    def wait(*arguments: Any) -> Any:
        assert release.wait(WAIT_S)
        return write_values(*arguments)

    with monkeypatch.context() as slow:
        slow.setattr(saver_module, "write_values", wait)
        try:
            yield release
        finally:
            release.set()
            run.saver.finish()


# --- a checkpoint on its way ------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_whole_and_holds_the_weights(run: Run) -> None:
    run.set_weights(3)
    run.save(5, val_loss=0.5)
    manifest = verify(run.store.path(5))
    assert (manifest.identity, manifest.metrics) == ({"lanes": 1}, {"val_loss": 0.5})
    assert load(run.store.path(5)).groups["weights"]["weight"].tolist() == [[3, 3]]
    assert run.saver.saved_step == 5
    [event] = run.events("checkpoint")
    assert (event["step"], event["bytes"]) == (5, 12)
    assert [event["step"] for event in run.events("saving")] == [5]
    assert run.hidden() == []


def test_weights_that_change_while_the_disk_is_slow_are_not_in_the_file(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.saver.reserve(run.state())
    run.set_weights(3)
    with held(run, monkeypatch):
        run.saver.start(5, run.state(), {})
        run.set_weights(4)
    weights = safetensors.torch.load_file(run.store.path(5) / "weights.safetensors")
    assert weights["weight"].tolist() == [[3, 3]]


def test_training_goes_on_while_one_checkpoint_is_written_and_the_next_is_owed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(every_steps=2)
    is_due = lambda step: run.saver.is_due(step, is_time=False, is_asked=False)  # noqa: E731
    assert [is_due(step) for step in (1, 2)] == [False, True]
    with held(run, monkeypatch):
        run.saver.start(2, run.state(), {})
        assert run.saver.is_busy
        assert [is_due(step) for step in (3, 4, 5)] == [False] * 3  # never two at a time
        assert run.steps() == []
    assert not run.saver.is_busy
    assert is_due(5)  # what step 4 was owed
    run.save(5)
    assert [is_due(step) for step in (7, 8)] == [False, True]
    assert run.steps() == [5, 2]


@pytest.mark.parametrize("why", ["is_time", "is_asked"])
def test_what_is_asked_for_while_another_is_written_comes_later(
    why: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no = {"is_time": False, "is_asked": False}
    assert not run.saver.is_due(1, **no)
    with held(run, monkeypatch):
        run.saver.start(1, run.state(), {})
        assert not run.saver.is_due(2, **{**no, why: True})
    assert run.saver.is_due(3, **no)
    run.save(3)
    assert not run.saver.is_due(4, **no)


def test_settling_takes_two_stages_and_nothing_is_visible_before_the_last(run: Run) -> None:
    run.saver.advance()  # nothing to do
    run.saver.start(5, run.state(), {})
    run.saver._pending.work.exception(WAIT_S)  # type: ignore[union-attr]
    assert run.steps() == []
    run.saver.advance()
    run.saver._pending.work.exception(WAIT_S)  # type: ignore[union-attr]
    assert run.steps() == [5]
    assert run.saver.saved_step == -1
    run.saver.advance()
    assert run.saver.saved_step == 5


def test_the_clock_asks_for_a_checkpoint_and_starts_anew_with_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = make_run(every_minutes=2)
    now[0] += 119
    assert not run.saver.is_time
    now[0] += 1
    assert run.saver.is_time
    run.save(1)
    assert not run.saver.is_time
    now[0] += 120
    assert run.saver.is_time


def test_without_a_cadence_no_clock_asks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert not run.saver.is_time


def test_a_run_that_waits_for_the_disk_has_its_checkpoint_when_the_step_is_over(make_run: MakeRun) -> None:
    run = make_run(**{"async": False})
    run.saver.start(5, run.state(), {})
    assert run.saver.saved_step == 5
    assert run.steps() == [5]


# --- saving at the end ------------------------------------------------------------------------------------------------


def test_a_step_is_not_saved_twice(run: Run) -> None:
    run.save(5)
    assert run.saver.save_now(5, pytest.fail, {})
    assert run.saver.save_now(6, run.state, {})
    assert len(run.events("checkpoint")) == 2


def test_saving_at_the_end_waits_for_the_one_on_its_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(run, monkeypatch) as release:
        run.saver.start(5, run.state(), {})
        threading.Timer(0.01, release.set).start()
        assert run.saver.save_now(5, pytest.fail, {})
    assert run.steps() == [5]


def test_going_on_from_a_step_and_stopping_there_leaves_its_checkpoint_alone(run: Run, make_run: MakeRun) -> None:
    run.save(5)
    later = make_run()
    assert later.saver.save_now(5, later.state, {})
    assert [path.name for path in later.store.folder.iterdir()] == ["step-00000005"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(make_run: MakeRun) -> None:
    run = make_run(keep=2, best={"metric": "accuracy", "mode": "max"})
    for step, accuracy in enumerate([0.1, 0.9, 0.5, float("nan"), 0.6], start=1):
        run.save(step, accuracy=accuracy)
    assert run.steps() == [5, 4, 2]


# --- a disk that fails ------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(run: Run) -> Iterator[None]:
    """No file can grow, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def vanished_folder(run: Run) -> Iterator[None]:
    """Somebody has put a file where the folder was; the checkpoints are elsewhere meanwhile."""
    aside = run.store.folder.rename(run.store.folder.with_name("aside"))
    run.store.folder.write_text("")
    try:
        yield
    finally:
        run.store.folder.unlink()
        aside.rename(run.store.folder)


@contextmanager
def failing(owner: Any, name: str, error: Exception) -> Iterator[None]:
    def fail(*arguments: Any, **keys: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(owner, name, fail)
        yield


def read_only_folder(run: Run) -> Any:
    return failing(Path, "mkdir", PermissionError(13, "Permission denied", str(run.store.partial(3))))


def no_room_for_the_manifest(run: Run) -> Any:
    return failing(Store, "publish", OSError(28, "No space left on device"))


def no_name(run: Run) -> Any:
    return failing(Path, "rename", OSError(30, "Read-only file system"))


def odd_error(run: Run) -> Any:
    return failing(saver_module, "write_values", TypeError("cannot pickle this"))


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (full_disk, "File too large"),
        (vanished_folder, "exists|Not a directory"),
        (read_only_folder, "Permission denied"),
        (no_room_for_the_manifest, "No space left on device"),
        (no_name, "Read-only file system"),
        (odd_error, "TypeError: cannot pickle this"),
    ],
)
@pytest.mark.parametrize("how", ["start", "save_now"])
def test_a_disk_that_fails_costs_a_warning_and_one_checkpoint(
    how: str, trouble: Callable[[Run], Any], text: str, make_run: MakeRun
) -> None:
    run = make_run(keep=1)
    run.save(2)
    # The events would meet the same full disk; here they are looked at, so they are put aside.
    told: list[tuple[str, dict[str, Any]]] = []
    run.saver._events.write = lambda kind, **fields: told.append((kind, fields))  # type: ignore[method-assign]
    with trouble(run):
        if how == "start":
            run.save(3)
        else:
            assert not run.saver.save_now(3, run.state, {})
    [warning] = [fields for kind, fields in told if kind == "warning"]
    assert warning["text"].startswith("the checkpoint of step 3 could not be saved: ")
    assert warning["text"].endswith("; training continues without it")
    assert warning["step"] == 3
    assert any(part in warning["text"] for part in text.split("|"))
    assert "checkpoint" not in [kind for kind, _ in told]
    assert run.saver.saved_step == 2
    assert run.steps() == [2]  # the old one is still there, and whole
    assert run.hidden() == []  # what there is of the new one takes no room
    # The next one works, the same step too.
    assert run.saver.save_now(3, run.state, {})
    assert run.steps() == [3]


def test_a_rank_without_a_disk_passes_on_what_others_wait_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []
    copy = run.saver._buffers.copy

    def watched(*arguments: Any) -> Any:
        wait = copy(*arguments)
        return lambda: passed.append(True) or wait()

    monkeypatch.setattr(run.saver._buffers, "copy", watched)
    with read_only_folder(run):
        run.save(3)
    assert passed == [True]
    assert run.steps() == []


def test_a_folder_that_was_removed_is_made_again(run: Run) -> None:
    run.save(2)
    shutil.rmtree(run.store.folder)
    run.save(3)
    assert run.steps() == [3]
    assert run.events("warning") == []


def test_one_ranks_trouble_is_everybodys_and_the_folder_is_empty_before_anyone_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions: list[list[str]] = []

    def decide(self: Alone, choose: Callable[[], Any]) -> Any:  # the others wait here for rank 0
        outcome = choose()
        decisions.append(run.hidden())
        return outcome

    monkeypatch.setattr(Alone, "gather_objects", lambda self, mine: [mine, "[Errno 28] No space left on device"])
    monkeypatch.setattr(Alone, "decide", decide)
    run.save(3)
    assert decisions == [[]]
    [warning] = run.events("warning")
    assert "No space left on device" in warning["text"]
    assert run.steps() == []


def test_files_of_other_ranks_are_in_the_manifest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in turn: rank 1 writes its share into the same folder before rank 0 settles."""

    class Second(Alone):
        rank, size, is_main = 1, 2, False

    class First(Alone):
        size = 2

        def gather_objects(self, thing: Any) -> list[Any]:
            return [thing, others]

    monkeypatch.setattr("paceline.checkpoint.files.MAX_FILE_BYTES", 4)
    events = Events(None)
    options = Checkpoint()
    first, second = (Saver(run.store, options, {}, world(), events) for world in (First, Second))  # type: ignore[arg-type]
    second.start(4, run.state(), {})
    others = second._pending.work.result(WAIT_S)  # type: ignore[union-attr]
    assert others
    assert "state.pt" not in [file.name for file in others]
    first.start(4, run.state(), {})
    first.finish()
    manifest = verify(run.store.path(4))
    assert {file.name for file in others} < {file.name for file in manifest.files}
    names = {path.name for path in run.store.path(4).iterdir()}
    assert names == {file.name for file in manifest.files} | {"manifest.json"}
    assert step_of(run.store.paths()[0]) == 4


def test_a_disk_that_stays_full_is_told_once_until_a_save_works_again(make_run: MakeRun) -> None:
    run = make_run(keep=1)
    told: list[int] = []
    run.saver._events.write = lambda kind, **fields: told.append(fields["step"]) if kind == "warning" else None  # type: ignore[method-assign]
    with no_room_for_the_manifest(run):
        for step in (2, 3, 4):
            run.save(step)
    assert told == [2]
    run.save(5)
    with no_room_for_the_manifest(run):
        run.save(6)
    assert told == [2, 6]
    assert run.steps() == [5]
