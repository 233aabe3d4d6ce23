"""Worker processes of a DataLoader, forked beside threads."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from multiprocessing import active_children

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data import workers


def fork_that_sticks(times: int) -> Callable[[], int]:
    """A fork whose first children never run any code."""
    fork, made = os.fork, []

    def stuck() -> int:
        made.append(None)
        pid = fork()
        if not pid and len(made) <= times:
            time.sleep(1000)
        return pid

    return stuck


def test_a_child_that_is_stuck_in_the_fork_is_forked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(os, "fork", fork_that_sticks(times=2))
    before, children = psutil.Process().num_fds(), psutil.Process().children()
    worker = workers.LoaderContext().Process(target=os._exit, args=(7,))
    worker.start()
    worker.join()
    assert worker.exitcode == 7
    worker.close()
    assert psutil.Process().num_fds() == before
    assert psutil.Process().children() == children  # none is left, not even as a zombie


def test_a_dataloader_reads_through_such_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(os, "fork", fork_that_sticks(times=1))
    loader = DataLoader(range(6), batch_size=2, num_workers=2, multiprocessing_context=workers.LoaderContext())  # type: ignore[arg-type, var-annotated]
    assert torch.cat(list(loader)).tolist() == list(range(6))


def test_a_rank_with_a_thousand_open_files_can_have_workers() -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        worker = workers.LoaderContext().Process(target=os._exit, args=(7,))
        worker.start()
        worker.join()
        assert worker.exitcode == 7
    finally:
        for file in held:
            os.close(file)


class ReportsDestruction:
    """Writes to a pipe when it is destroyed."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.cycle = pipe, self

    def __del__(self) -> None:
        os.write(self.pipe, b"destroyed")


def test_garbage_of_the_parent_is_not_destroyed_in_a_worker() -> None:
    """A process group among it would wait for its threads, which a child does not have."""
    read, write = os.pipe()
    gc.collect()
    gc.disable()
    try:
        ReportsDestruction(write)
        worker = workers.LoaderContext().Process(target=gc.collect)
        worker.start()
        worker.join()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 100)
        assert worker.exitcode == 0
        gc.collect()
        assert os.read(read, 100) == b"destroyed"
    finally:
        gc.enable()
        os.close(read)
        os.close(write)


class Unfreed:
    """Part of a reference cycle, as a loop is that keeps its loader."""

    def __init__(self, loader: workers.WorkerLoader) -> None:
        self.loader, self.batches, self.cycle = loader, iter(loader), self


def test_workers_of_a_loader_in_a_cycle_end_when_they_are_asked_to() -> None:
    """Garbage collection would wait for them in vain, and then send a SIGTERM, which they ignore."""
    options = {"worker_init_fn": workers.start_worker, "persistent_workers": True}
    loader = workers.WorkerLoader(
        range(6), num_workers=2, multiprocessing_context=workers.LoaderContext(), **options
    )  # fmt: skip
    loop = Unfreed(loader)
    next(loop.batches)
    children = [child for child in active_children() if isinstance(child, workers.LoaderProcess)]
    assert len(children) == 2
    workers.end_workers()
    assert [child.exitcode for child in children] == [0, 0]
    workers.end_workers()  # nothing is left
    assert next(iter(loader)) == 0  # it can be read again
    workers.end_workers()
