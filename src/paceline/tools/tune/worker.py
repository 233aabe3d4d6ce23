"""A process that trains one trial after the other, and may crash without harm to the search.

It has imported torch once for all of them, as the nursery of its ranks has.
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
from paceline.system.parent import die_with_parent
from paceline.system.signals import TIME_IS_UP, describe
from paceline.tools.tune.goal import RETURNED
from paceline.tools.tune.shares import keep_to
from paceline.trainer import Trainer, build_config

if TYPE_CHECKING:
    from paceline.results.result import Result


@dataclass(frozen=True)
class Job:
    """What the process is told of a trial."""

    config: str  # the config's file, with a run_dir
    log: str
    outcome: str  # the file to leave

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    state: str  # done, stopped or failed
    reason: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)  # what was measured, an epoch a row


def main() -> None:
    """Train what each line of the input says, and leave how it went. A process that is killed leaves nothing."""
    parent, cores = json.loads(sys.argv[1])
    die_with_parent(parent)
    keep_to(cores)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        _write_to(job.log)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it dies of a request to stop until its ranks have begun
        outcome = train(Path(job.config))
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # one that comes too late is for no other trial
        write_json(Path(job.outcome), asdict(outcome))


def _write_to(log: str) -> None:
    """Output and errors go to a file from now on."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def train(path: Path) -> Outcome:
    """Train what the config in a file describes."""
    raw = read_yaml(path)
    folder = Path(raw["folder"])
    from paceline import launch

    try:
        launch.prepare(raw, folder)
        result = Trainer.from_config(build_config(raw, folder), folder).start()
    except Stopped as stopped:
        # Trials may have equal times instead of equal lengths: what was measured by then counts.
        if not str(stopped).startswith(f"stopped by {describe(TIME_IS_UP)}"):
            return Outcome("stopped", str(stopped))
        return Outcome("done", str(stopped), _epochs(Path(raw["run_dir"])))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return Outcome("failed", str(error))
    return Outcome("done", history=result.history or _returned(result))


def _epochs(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read(RunFolder(run_dir).events) if event["event"] == "epoch"]


def _returned(result: Result) -> list[dict[str, Any]]:
    """What a `train_fn` has returned, if it is a number or numbers by name."""
    value = result.value
    named = value if isinstance(value, Mapping) else {RETURNED: value}
    row = {}
    for name, number in named.items():
        with suppress(TypeError, ValueError, RuntimeError):  # an array or tensor of several numbers
            if hasattr(number, "__float__"):
                row[str(name)] = float(number)
    return [row] if row else []
