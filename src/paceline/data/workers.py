"""The processes of a DataLoader: forked, so that data sets of a script or notebook need not be pickled.

A rank has threads, and a fork beside threads has two traps. In Python 3.11 the child may wait for ever, before it runs
anything, for a lock that a thread of torch's held in that moment; so every child must say that it lives, or it is made
anew. And a child that collects its parent's garbage may destroy a process group, which waits for threads that it lacks.
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

from paceline.system.parent import die_with_parent
from paceline.system.signals import ignore_signals

START_TIMEOUT_S = 2.0  # at first; a child that is only slow has done nothing yet and is made anew, too


class LoaderProcess(ForkProcess):
    """A process that says when it lives."""

    cry = -1  # where to

    @staticmethod
    def _Popen(process_obj: LoaderProcess) -> Popen:  # type: ignore[override]  # noqa: N802, the standard library's name
        return LoaderPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        os.write(self.cry, b".")
        gc.freeze()
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc, no-any-return]


class LoaderPopen(Popen):
    """Forks until a child lives."""

    def _launch(self, process_obj: LoaderProcess) -> None:
        patience_s = START_TIMEOUT_S
        while not self._lives(process_obj, patience_s):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.finalizer()  # type: ignore[misc]
            patience_s *= 2

    def _lives(self, process_obj: LoaderProcess, patience_s: float) -> bool:
        ear, process_obj.cry = os.pipe()
        try:
            super()._launch(process_obj)  # type: ignore[misc]
            return bool(wait([ear], patience_s))  # not select(), which knows no file beyond the 1023rd
        finally:
            os.close(ear)
            os.close(process_obj.cry)


@atexit.register  # after the standard library's own, so it comes before it
def _kill_workers() -> None:
    """Those of a loader that somebody still holds would be waited for, and they heed no other signal."""
    for child in active_children():
        if isinstance(child, LoaderProcess):
            child.kill()


class LoaderContext(ForkContext):
    """How a DataLoader is told to make such processes."""

    Process = LoaderProcess


def start_worker(worker: int) -> None:
    """In a worker, before it reads anything."""
    ignore_signals()
    die_with_parent()
