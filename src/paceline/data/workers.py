"""The worker processes of a DataLoader: forked, so that data sets of a script or notebook do not have to be pickled.

A rank has threads, and forking a process with threads has two hazards. In Python 3.11 the child may wait forever,
before it runs any of its code, for a lock that a thread of torch held at the fork; so every child must report that it
has started, or it is killed and forked again. And a child that collects its parent's garbage may destroy a process
group, which waits for threads that the child does not have.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from paceline.system.processes import die_with_parent
from paceline.system.signals import ignore_signals

START_TIMEOUT_S = 2.0  # doubled with each fork; forking a slow child again is harmless, because it has done nothing yet


class LoaderProcess(ForkProcess):
    """A process that reports when it has started."""

    ready_fd = -1  # the pipe to which it reports

    @staticmethod
    def _Popen(process_obj: LoaderProcess) -> Popen:  # type: ignore[override]  # noqa: N802, the standard library's name
        return LoaderPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        ignore_signals()
        os.write(self.ready_fd, b".")
        gc.freeze()
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc, no-any-return]


class LoaderPopen(Popen):
    """Forks until a child has started."""

    def _launch(self, process_obj: LoaderProcess) -> None:
        timeout_s = START_TIMEOUT_S
        while not self._has_started(process_obj, timeout_s):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.finalizer()  # type: ignore[misc]
            timeout_s *= 2

    def _has_started(self, process_obj: LoaderProcess, timeout_s: float) -> bool:
        """Fork, and return whether the child reports within `timeout_s`."""
        receiver, process_obj.ready_fd = os.pipe()
        try:
            super()._launch(process_obj)  # type: ignore[misc]
            return bool(wait([receiver], timeout_s))  # not select(), which fails for file descriptors above 1023
        finally:
            os.close(receiver)
            os.close(process_obj.ready_fd)


@atexit.register  # after multiprocessing has registered its own handler, so this one runs first
def _kill_workers() -> None:
    """Kill the workers of loaders that still exist: multiprocessing would wait for them, and they ignore SIGTERM."""
    for child in active_children():
        if isinstance(child, LoaderProcess):
            child.kill()


class LoaderContext(ForkContext):
    """The `multiprocessing_context` with which a DataLoader starts these processes."""

    Process = LoaderProcess


_loaders: WeakSet[WorkerLoader] = WeakSet()


class WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers `end_workers` ends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _loaders.add(self)


def end_workers() -> None:
    """End the workers of all loaders.

    A loader in a reference cycle cannot do so itself: garbage collection closes the queues first with which it asks
    its workers to end, and it waits ten seconds for each of them.
    """
    for loader in list(_loaders):
        if (iterator := loader._iterator) is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            loader._iterator = None


def start_worker(worker: int) -> None:
    """Set up a worker; the DataLoader calls it before it reads samples."""
    ignore_signals()  # again: torch has set a handler for SIGTERM
    die_with_parent()
