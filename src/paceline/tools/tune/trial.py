"""The search's interface to the run of one trial: starts it, reads its epochs, stops it, and reads its outcome."""

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
from paceline.system.processes import command_of
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.shares import MachineShare
from paceline.tools.tune.worker import TrialJob, TrialOutcome


class TrialProcess:
    """The process that trains the trials of one slot. A new process is started if it has died.

    It has its own session, so that Ctrl-C reaches only the search.
    """

    def __init__(self, share: MachineShare) -> None:
        self._share = share
        self._process: subprocess.Popen[str] | None = None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def train(self, job: TrialJob) -> None:
        """Send it a trial to train."""
        try:
            self._write(job)
        except BrokenPipeError:  # it has just died
            self.close()
            self._write(job)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill it; its ranks end with it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process = None

    def _write(self, job: TrialJob) -> None:
        if self.exit_code is not None:
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
    """The training of one trial, in a process that trains several in turn."""

    def __init__(self, folder: StudyFolder, number: int, raw: Mapping[str, Any], process: TrialProcess) -> None:
        self._began, self._process = time.monotonic(), process
        self._log, self._outcome = folder.log(number), folder.outcome(number)
        self._events = Tail(RunFolder(Path(raw["run_dir"])).events)
        self._is_stopping = False
        write_text(folder.config(number), dump_yaml(raw))
        self._outcome.unlink(missing_ok=True)  # from an earlier attempt
        process.train(TrialJob(str(folder.config(number)), str(self._log), str(self._outcome)))

    @property
    def seconds(self) -> float:
        """The time since its start."""
        return time.monotonic() - self._began

    def epochs(self) -> Iterator[dict[str, Any]]:
        """The epochs that have ended since the last call; after a restart, some may be repeated."""
        for line in self._events.lines():
            event = parse(line)
            if event is not None and event["event"] == "epoch":
                yield event

    def stop(self) -> None:
        """Request its ranks to save and stop at the same step."""
        if not self._is_stopping:  # a second signal would end it immediately
            self._is_stopping = True
            self._process.signal(signal.SIGTERM)

    def outcome(self) -> TrialOutcome | None:
        """The outcome; None while the trial runs."""
        code = self._process.exit_code  # before the file, which a process that has ended has written by now
        if (written := TrialOutcome.read(self._outcome)) is not None or code is None:
            return written
        if self._is_stopping and code == -signal.SIGTERM:  # it had not started to train
            return TrialOutcome("stopped")
        if code < 0:
            return TrialOutcome("failed", f"its process was terminated by signal {-code}; see {self._log}")
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
        last = next((f": {line}" for line in reversed(lines) if line.strip()), "")
        return TrialOutcome("failed", f"its process ended with exit code {code}{last}\nsee {self._log}")
