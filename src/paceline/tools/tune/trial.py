"""The run of one trial, seen from the search: start it, hear of its epochs, have it stop, know how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import dump_yaml
from paceline.observe.event_types import parse
from paceline.observe.tail import Tail
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.system.child import command_of
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.shares import Share
from paceline.tools.tune.worker import Job, Outcome


class Worker:
    """The process of one place, which trains its trials; a new one when it has died.

    It has a session of its own, so Ctrl-C reaches the search alone.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._process: subprocess.Popen[str] | None = None

    @property
    def code(self) -> int | None:
        """How it has ended; None while it lives."""
        return self._process.poll() if self._process is not None else None

    def give(self, job: Job) -> None:
        """Have it train a trial."""
        try:
            self._write(job)
        except BrokenPipeError:  # it was about to die
            self.close()
            self._write(job)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        """End it at once; its ranks go with it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process = None

    def _write(self, job: Job) -> None:
        if self.code is not None:
            self.close()
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(job.to_json())
        self._process.stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        gpus = self._share.gpus
        variables = [] if gpus is None else ["env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"]
        argument = json.dumps([os.getpid(), self._share.cores])
        return subprocess.Popen(
            [*variables, *command_of("paceline.tools.tune.worker", argument)],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip


class TrialRun:
    """A `paceline train` of one trial."""

    def __init__(self, folder: StudyFolder, number: int, raw: Mapping[str, Any], worker: Worker) -> None:
        self._began, self._worker = time.monotonic(), worker
        self._log, self._outcome = folder.log(number), folder.outcome(number)
        self._events = Tail(RunFolder(Path(raw["run_dir"])).events)
        self._is_asked = False
        write_text(folder.config(number), dump_yaml(raw))
        self._outcome.unlink(missing_ok=True)  # of a life that was cut short
        worker.give(Job(str(folder.config(number)), str(self._log), str(self._outcome)))

    @property
    def seconds(self) -> float:
        """How long it has run by now."""
        return time.monotonic() - self._began

    def epochs(self) -> Iterator[dict[str, Any]]:
        """The epochs that have ended since this was last asked; after a restart, some may come again."""
        for line in self._events.lines():
            event = parse(line)
            if event is not None and event["event"] == "epoch":
                yield event

    def stop(self) -> None:
        """Have all ranks agree to save and stop."""
        if not self._is_asked:  # a second request would end it at once
            self._is_asked = True
            self._worker.signal(signal.SIGTERM)

    def outcome(self) -> Outcome | None:
        """How it has ended; None while it runs."""
        code = self._worker.code  # before the file: what it has written by its end is there
        if self._outcome.exists():
            return Outcome(**json.loads(self._outcome.read_text(encoding="utf-8")))
        if code is None:
            return None
        if self._is_asked and code == -signal.SIGTERM:  # it had not begun to train
            return Outcome("stopped")
        if code < 0:
            return Outcome("failed", f"its process was ended by signal {-code}; see {self._log}")
        written = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
        last = next((f": {line}" for line in reversed(written) if line.strip()), "")
        return Outcome("failed", f"its process ended with exit code {code}{last}\nsee {self._log}")
