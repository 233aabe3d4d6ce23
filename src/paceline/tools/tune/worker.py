"""The process that trains one trial after another. It may crash without ending the search.

It imports torch once for all trials, and so does the process that forks its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import read_yaml
from paceline.errors import PacelineError, Stopped
from paceline.observe.events import read
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.processes import die_with_parent
from paceline.system.signals import TIME_IS_UP, describe
from paceline.tools.tune.goal import RETURNED
from paceline.tools.tune.shares import pin_to
from paceline.trainer import Trainer, build_config

if TYPE_CHECKING:
    from paceline import Result  # imports torch, which must wait for `launch.prepare`


@dataclass(frozen=True)
class TrialJob:
    """One trial to train: a line of the input of the process."""

    config: str  # the file of a config that has a run_dir
    log: str  # the file for its output
    outcome: str  # the file to write when it has ended

    def to_json(self) -> str:
        """The job as a line."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial."""

    state: str  # done, stopped or failed
    reason: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)  # the measured metrics, a row for each epoch

    @classmethod
    def read(cls, path: Path) -> TrialOutcome | None:
        """The outcome in a file; None if there is no file."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def main() -> None:
    """Train the job of each input line, and write its outcome. A process that is killed writes no outcome."""
    parent, cores = json.loads(sys.argv[1])
    die_with_parent(parent)
    pin_to(cores)
    for line in sys.stdin:
        job = TrialJob(**json.loads(line))
        _write_output_to(job.log)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # the default action ends the process until its ranks have started
        outcome = train(Path(job.config))
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # a late signal must not end the next trial
        write_json(Path(job.outcome), asdict(outcome))


def _write_output_to(log: str) -> None:
    """Redirect output and errors to a file from now on."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def train(path: Path) -> TrialOutcome:
    """Train the config in a file."""
    raw = read_yaml(path)
    folder = Path(raw["folder"])
    from paceline import launch

    try:
        launch.prepare(raw, folder)
        result = Trainer.from_config(build_config(raw, folder), folder).start()
    except Stopped as stopped:
        # With a time limit, trials have equal times instead of equal lengths: metrics measured before the limit count.
        if not str(stopped).startswith(f"stopped by {describe(TIME_IS_UP)}"):
            return TrialOutcome("stopped", str(stopped))
        return TrialOutcome("done", str(stopped), _epochs(Path(raw["run_dir"])))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return TrialOutcome("failed", str(error))
    return TrialOutcome("done", history=[*result.history, *_returned(result)])


def _epochs(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read(RunFolder(run_dir).events) if event["event"] == "epoch"]


def _returned(result: Result) -> list[dict[str, Any]]:
    """The return value of a `train_fn` as one row, if it is a number or numbers by name."""
    value = result.value
    named = value if isinstance(value, Mapping) else {RETURNED: value}
    row = {}
    for name, number in named.items():
        with suppress(TypeError, ValueError, RuntimeError):  # an array or tensor of several numbers
            if hasattr(number, "__float__"):
                row[str(name)] = float(number)
    return [row] if row else []
