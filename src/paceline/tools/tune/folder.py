"""The folder of a study: the names of all files in it."""

from __future__ import annotations

import uuid
from pathlib import Path

from paceline.run.atomic_files import write_text


class StudyFolder:
    """The files of a study: a run folder and three files for each trial, and the files of the whole study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "study.db"
        self.best = path / "best.yaml"
        self.table = path / "trials.csv"
        self.plots = path / "plots.html"
        self._name = path / ".name"

    def name(self) -> str:
        """A unique name of this folder, which does not change when the folder is moved."""
        if not self._name.exists():
            write_text(self._name, uuid.uuid4().hex)
        return self._name.read_text(encoding="utf-8")

    def run(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.path / f"trial-{number:04}"

    def config(self, number: int) -> Path:
        """The config of a trial, which `paceline train` can also read."""
        return self.path / f"trial-{number:04}.yaml"

    def log(self, number: int) -> Path:
        """The output of a trial, as `paceline train` would print it."""
        return self.path / f"trial-{number:04}.log"

    def outcome(self, number: int) -> Path:
        """The file with the outcome of a trial."""
        return self.path / f"trial-{number:04}.json"
