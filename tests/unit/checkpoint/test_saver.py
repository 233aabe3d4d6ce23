"""checkpoint/saver.py with one rank, or two ranks simulated in turn, and a real writer thread."""

from __future__ import annotations

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
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.interval import Failures
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture
from paceline.checkpoint.store import Store, step_of, verify
from paceline.config import Checkpoint
from paceline.observe.events import Events, read
from paceline.world import World
from support.clocks import FakeClock
from support.disks import file_size_limit
from support.worlds import fake_world

WAIT_S = 20


class Run:
    """A model, and a saver with its events."""

    def __init__(
        self, path: Path, *, world: World | None = None, failures: Failures | None = None, **options: Any
    ) -> None:
        self.store, self._events = Store(path / "checkpoints"), path / "events.jsonl"
        options = {"every_minutes": None, **options}
        self.writer = Events(self._events)
        self.saver = Saver(
            self.store, Checkpoint(**options), {"lanes": 1}, world or fake_world(), self.writer, failures=failures
        )
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

    def hidden_folders(self) -> list[str]:
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
def slow_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block the writer thread until the event is set or the block ends."""
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


# --- one save ---------------------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_valid_and_holds_the_weights(run: Run) -> None:
    run.set_weights(3)
    run.save(5, val_loss=0.5)
    manifest = verify(run.store.path(5))
    assert (manifest.identity, manifest.metrics) == ({"lanes": 1}, {"val_loss": 0.5})
    assert load(run.store.path(5)).groups["weights"]["weight"].tolist() == [[3, 3]]
    assert run.saver.saved_step == 5
    [event] = run.events("checkpoint")
    assert (event["step"], event["bytes"]) == (5, 12)
    assert [event["step"] for event in run.events("saving")] == [5]
    assert run.hidden_folders() == []


def test_weights_that_change_during_a_save_are_not_in_the_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.saver.reserve(run.state())
    run.set_weights(3)
    with slow_disk(run, monkeypatch):
        run.saver.start(5, run.state(), {})
        run.set_weights(4)
    weights = safetensors.torch.load_file(run.store.path(5) / "weights.safetensors")
    assert weights["weight"].tolist() == [[3, 3]]


def is_due_at(saver: Saver, step: int, *, is_time: bool = False, is_asked: bool = False) -> bool:
    saver.request(step, is_time=is_time, is_asked=is_asked)
    return saver.is_due


def test_a_step_that_is_due_during_a_save_is_saved_after_it(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(every_steps=2)
    is_due = lambda step: is_due_at(run.saver, step)  # noqa: E731
    assert [is_due(step) for step in (1, 2)] == [False, True]
    with slow_disk(run, monkeypatch):
        run.saver.start(2, run.state(), {})
        assert run.saver.is_busy
        assert [is_due(step) for step in (3, 4, 5)] == [False] * 3  # never two at a time
        assert run.steps() == []
    assert not run.saver.is_busy
    assert is_due(5)  # the request of step 4
    run.save(5)
    assert [is_due(step) for step in (7, 8)] == [False, True]
    assert run.steps() == [5, 2]


@pytest.mark.parametrize("why", ["is_time", "is_asked"])
def test_a_request_during_a_save_is_kept_for_later(why: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    no = {"is_time": False, "is_asked": False}
    assert not is_due_at(run.saver, 1, **no)
    with slow_disk(run, monkeypatch):
        run.saver.start(1, run.state(), {})
        assert not is_due_at(run.saver, 2, **{**no, why: True})
    assert is_due_at(run.saver, 3, **no)
    run.save(3)
    assert not is_due_at(run.saver, 4, **no)


def wait_for_writer(saver: Saver) -> None:
    """Wait until the writer thread is idle."""
    deadline = time.monotonic() + WAIT_S
    while saver.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_save_is_published_and_reported_in_two_stages(run: Run) -> None:
    run.saver.advance()  # nothing to do
    run.saver.start(5, run.state(), {})
    wait_for_writer(run.saver)
    assert run.steps() == []
    run.saver.advance()
    wait_for_writer(run.saver)
    assert run.steps() == [5]
    assert run.saver.saved_step == -1
    run.saver.advance()
    assert run.saver.saved_step == 5


def test_a_checkpoint_is_due_every_given_minutes_after_the_last_one(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes=2)
    clock.advance(119)
    assert not run.saver.is_time
    clock.advance(1)
    assert run.saver.is_time
    run.save(1)
    assert not run.saver.is_time
    clock.advance(120)
    assert run.saver.is_time


def test_without_every_minutes_no_checkpoint_is_due_by_time(run: Run, clock: FakeClock) -> None:
    clock.advance(1e12)
    assert not run.saver.is_time


def steps(run: Run, clock: FakeClock, count: int, step_s: float, first: int = 1) -> None:
    """Steps without a save."""
    for step in range(first, first + count):
        clock.advance(step_s)
        run.saver.end_step(step)


def save_by_time(run: Run, clock: FakeClock, *, held_s: float, steps_s: list[float]) -> None:
    """A save that blocks the loop, then steps until it is published."""
    assert run.saver.is_time
    start = run.saver._buffers.copy
    run.saver._buffers.copy = lambda *given: (clock.advance(held_s), start(*given))[1]  # type: ignore[method-assign]
    run.saver.start(1, run.state(), {})
    run.saver._buffers.copy = start  # type: ignore[method-assign]
    for step_s in steps_s:
        clock.advance(step_s)
        run.saver.end_step(2)
    run.saver.finish()


def test_auto_saves_after_a_minute_then_by_the_measured_cost_of_saves(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes="auto")
    steps(run, clock, 59, 1.0)
    assert not run.saver.is_time
    steps(run, clock, 1, 1.0)
    save_by_time(run, clock, held_s=0.5, steps_s=[1.25, 1.0])  # the first step is slowed down
    [event] = run.events("checkpoint")
    assert event["cost_s"] == 0.75
    assert run.events("save_interval") == []
    steps(run, clock, 597, 1.0)
    assert not run.saver.is_time
    steps(run, clock, 1, 1.0)
    assert run.saver.is_time
    [event] = run.events("save_interval")
    assert (event["interval_s"], event["cost_s"]) == (600, 0.75)
    assert event["text"] == (
        "a checkpoint is saved every 10 min: a save costs 0.75 s, and 1 rank is expected to fail once in 50,000 h"
    )


def test_auto_saves_more_often_in_a_run_that_has_failed_often(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes="auto", failures=Failures(2, count=3, observed_s=3 * 7200.0 - 60))
    steps(run, clock, 60, 1.0)
    save_by_time(run, clock, held_s=2.0, steps_s=[1.0])
    steps(run, clock, 1, 1.0)
    [event] = run.events("save_interval")
    assert event["interval_s"] == pytest.approx(168, abs=1)  # Young: sqrt(2 * 2 * 7200) = 170, less 2
    assert event["text"].endswith("a save costs 2 s, and this run has failed 3 times in 6 h")


def test_auto_reports_only_large_changes_of_the_interval(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes="auto")
    for held_s in (1.0, 1.0, 30.0, 30.0, 30.0, 32.0):
        steps(run, clock, 60, 60.0)
        save_by_time(run, clock, held_s=held_s, steps_s=[60.0])
        steps(run, clock, 1, 60.0)
    assert [event["interval_s"] for event in run.events("save_interval")] == [600, 1550, 3000]


def test_the_steps_of_an_evaluation_do_not_hide_the_cost_of_a_save(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes="auto")
    steps(run, clock, 30, 1.0)
    steps(run, clock, 1, 300.0)
    save_by_time(run, clock, held_s=0.5, steps_s=[1.0, 1.0])
    [event] = run.events("checkpoint")
    assert event["cost_s"] == 0.5


def test_a_run_of_less_than_a_minute_reports_no_interval(make_run: MakeRun, clock: FakeClock) -> None:
    run = make_run(every_minutes="auto", every_steps=10)
    steps(run, clock, 30, 1.0)
    run.save(30)
    steps(run, clock, 20, 1.0, first=31)
    assert run.events("save_interval") == []


def test_a_synchronous_save_is_published_when_start_returns(make_run: MakeRun) -> None:
    run = make_run(**{"async": False})
    run.saver.start(5, run.state(), {})
    assert run.saver.saved_step == 5
    assert run.steps() == [5]


# --- save_now ---------------------------------------------------------------------------------------------------------


def test_a_step_is_not_saved_twice(run: Run) -> None:
    run.save(5)
    assert run.saver.save_now(5, pytest.fail, {})
    assert run.saver.save_now(6, run.state, {})
    assert len(run.events("checkpoint")) == 2


def test_save_now_waits_for_a_pending_save_of_the_same_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_disk(run, monkeypatch) as release:
        run.saver.start(5, run.state(), {})
        threading.Timer(0.01, release.set).start()
        assert run.saver.save_now(5, pytest.fail, {})
    assert run.steps() == [5]


def test_a_run_that_stops_where_it_was_resumed_keeps_that_checkpoint(run: Run, make_run: MakeRun) -> None:
    run.save(5)
    later = make_run()
    assert later.saver.save_now(5, later.state, {})
    assert [path.name for path in later.store.folder.iterdir()] == ["step-00000005"]


# --- retention --------------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(make_run: MakeRun) -> None:
    run = make_run(keep=2, best={"metric": "accuracy", "mode": "max"})
    for step, accuracy in enumerate([0.1, 0.9, 0.5, float("nan"), 0.6], start=1):
        run.save(step, accuracy=accuracy)
    assert run.steps() == [5, 4, 2]


# --- disk errors ------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(run: Run) -> Iterator[None]:
    with file_size_limit(100):
        yield


@contextmanager
def file_instead_of_folder(run: Run) -> Iterator[None]:
    """Put a file in the place of the folder, and the folder back at the end."""
    aside = run.store.folder.rename(run.store.folder.with_name("aside"))
    run.store.folder.write_text("")
    try:
        yield
    finally:
        run.store.folder.unlink()
        aside.rename(run.store.folder)


@contextmanager
def raising(owner: Any, name: str, error: Exception) -> Iterator[None]:
    def fail(*arguments: Any, **keys: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(owner, name, fail)
        yield


def read_only_folder(run: Run) -> Any:
    return raising(Path, "mkdir", PermissionError(13, "Permission denied", str(run.store.partial(3))))


def no_space_for_the_manifest(run: Run) -> Any:
    return raising(Store, "publish", OSError(28, "No space left on device"))


def rename_fails(run: Run) -> Any:
    return raising(Path, "rename", OSError(30, "Read-only file system"))


def unexpected_error(run: Run) -> Any:
    return raising(saver_module, "write_values", TypeError("cannot pickle this"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (full_disk, "File too large"),
        (file_instead_of_folder, "exists|Not a directory"),
        (read_only_folder, "Permission denied"),
        (no_space_for_the_manifest, "No space left on device"),
        (rename_fails, "Read-only file system"),
        (unexpected_error, "TypeError: cannot pickle this"),
    ],
)
@pytest.mark.parametrize("how", ["start", "save_now"])
def test_a_disk_error_costs_one_checkpoint_and_writes_a_warning(
    how: str, fault: Callable[[Run], Any], text: str, make_run: MakeRun
) -> None:
    run = make_run(keep=1)
    run.save(2)
    # Events are collected in a list, because writing them would fail on the same full disk.
    events: list[tuple[str, dict[str, Any]]] = []
    run.writer.write = lambda kind, **fields: events.append((kind, fields))  # type: ignore[method-assign]
    with fault(run):
        if how == "start":
            run.save(3)
        else:
            assert not run.saver.save_now(3, run.state, {})
    [warning] = [fields for kind, fields in events if kind == "warning"]
    assert warning["text"].startswith("the checkpoint of step 3 could not be saved: ")
    assert warning["text"].endswith("; training continues without it")
    assert warning["step"] == 3
    assert any(part in warning["text"] for part in text.split("|"))
    assert "checkpoint" not in [kind for kind, _ in events]
    assert run.saver.saved_step == 2
    assert run.steps() == [2]  # the old checkpoint is still valid
    assert run.hidden_folders() == []  # no partial folder takes space
    # The next save works, also of the same step.
    assert run.saver.save_now(3, run.state, {})
    assert run.steps() == [3]


def test_tensors_for_other_ranks_are_sent_before_a_disk_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    copy = HostBuffers.copy

    def recorded(*arguments: Any) -> Any:
        wait = copy(*arguments)
        return lambda: sent.append(True) or wait()

    monkeypatch.setattr(HostBuffers, "copy", recorded)
    with read_only_folder(run):
        run.save(3)
    assert sent == [True]
    assert run.steps() == []


def test_a_removed_folder_is_created_again(run: Run) -> None:
    run.save(2)
    shutil.rmtree(run.store.folder)
    run.save(3)
    assert run.steps() == [3]
    assert run.events("warning") == []


def test_an_error_of_one_rank_discards_the_checkpoint_before_any_rank_continues(make_run: MakeRun) -> None:
    left: list[list[str]] = []
    world = fake_world(
        gathered=lambda mine: [mine, "[Errno 28] No space left on device"],
        on_decision=lambda: left.append(run.hidden_folders()),
    )
    run = make_run(world=world)
    run.save(3)
    assert left == [[]]
    [warning] = run.events("warning")
    assert "No space left on device" in warning["text"]
    assert run.steps() == []


def test_files_of_other_ranks_are_in_the_manifest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes its files into the same folder before rank 0 publishes."""

    monkeypatch.setattr("paceline.checkpoint.files.MAX_FILE_BYTES", 4)
    events = Events(None)
    options = Checkpoint()
    sent: list[Any] = []
    worlds = (
        fake_world(size=2, gathered=lambda mine: [mine, *sent]),
        fake_world(rank=1, size=2, gathered=lambda mine: sent.append(mine) or [mine, mine]),
    )
    first, second = (Saver(run.store, options, {}, world, events) for world in worlds)
    second.start(4, run.state(), {})
    second.finish()
    [others] = sent
    assert others
    assert "state.pt" not in [file.name for file in others]
    first.start(4, run.state(), {})
    first.finish()
    manifest = verify(run.store.path(4))
    assert {file.name for file in others} < {file.name for file in manifest.files}
    names = {path.name for path in run.store.path(4).iterdir()}
    assert names == {file.name for file in manifest.files} | {"manifest.json"}
    assert step_of(run.store.paths()[0]) == 4


def test_repeated_disk_errors_write_one_warning_until_a_save_works(make_run: MakeRun) -> None:
    run = make_run(keep=1)
    warned_steps: list[int] = []
    run.writer.write = lambda kind, **fields: warned_steps.append(fields["step"]) if kind == "warning" else None  # type: ignore[method-assign]
    with no_space_for_the_manifest(run):
        for step in (2, 3, 4):
            run.save(step)
    assert warned_steps == [2]
    run.save(5)
    with no_space_for_the_manifest(run):
        run.save(6)
    assert warned_steps == [2, 6]
    assert run.steps() == [5]
