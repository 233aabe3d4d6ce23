"""The run folder: this file owns the name of everything in it."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import ConfigError


class RunFolder:
    """The folder that holds everything about one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.job = path / "job.bin"
        self.events = path / "events.jsonl"
        self.logs = path / "logs"
        self.weights = path / "weights.safetensors"
        self.ema = path / "ema.safetensors"
        self.value = path / "value.pkl"
        self.result = path / "result.json"

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new run folder with the config in it: exactly `run_dir`, or `runs/<name>/<date-time>` of its own."""
        folder = cls(new_folder(config.run_dir, Path("runs") / config.name))
        folder.logs.mkdir(exist_ok=True)
        try:
            with folder.config.open("x", encoding="utf-8") as file:
                file.write(config.to_yaml())
        except FileExistsError:
            raise ConfigError(
                f"run_dir={config.run_dir} already holds a run; choose another folder or remove it"
            ) from None
        return folder

    def log(self, rank: int | str) -> Path:
        """The log of one rank: everything it wrote to stdout and stderr."""
        return self.logs / f"rank-{rank}.log"

    def failure(self, rank: int) -> Path:
        """What a rank wrote about its own failure before it ended."""
        return self.logs / f"rank-{rank}.failure.json"


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, and that is seen whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is seen whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def new_folder(wanted: Path | None, parent: Path) -> Path:
    """The folder that was asked for, or `<parent>/<date-time>` that nobody else has."""
    if wanted is not None:
        _make(wanted, exist_ok=True)
        return wanted.resolve()
    parent = parent.resolve()
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(1, 10_000):
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        if not path.exists() and _make(path, exist_ok=False):
            return path
    raise AssertionError(f"no free run folder under {parent}")


def _make(path: Path, *, exist_ok: bool) -> bool:
    """Make a folder; False if somebody else has made it first."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok or not path.is_dir():
            raise ConfigError(f"run_dir={path} is a file; choose another name") from None
        return False
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made: {error.strerror}; choose another with --run-dir") from None
    return True
