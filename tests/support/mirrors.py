"""Run folders with checkpoints of a few bytes, and their mirrors in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoint.store import Store
from paceline.mirror.claim import claim
from paceline.mirror.copier import Copier, Retention
from paceline.run import checked_files
from paceline.run.layout import RunFolder

KEEP_ALL = Retention(100, None)


def make_run(path: Path, *steps: int, config: str = "name: lab\nlanes: 1\n") -> RunFolder:
    """A run folder with a config, an event and these checkpoints."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    folder.logs.mkdir(exist_ok=True)
    folder.config.write_text(config)
    folder.events.write_text('{"event": "run_started", "time": 1.0}\n')
    for step in steps:
        publish(folder, step)
    return folder


def publish(folder: RunFolder, step: int, **metrics: float) -> Path:
    """Publish a checkpoint of two small files."""
    store = Store(folder.checkpoints)
    store.partial(step).mkdir(parents=True)
    written = [
        checked_files.write(store.partial(step) / name, [f"{name} of {step}".encode() * 50])
        for name in ("weights.safetensors", "state.pt")
    ]
    return store.publish(step, written, {"lanes": 1}, metrics)


def copier_of(
    folder: RunFolder, mirror: Path | str, retention: Retention = KEEP_ALL, name: str = "lab", **calls: Any
) -> Copier:
    """The copier of a run to its place in a mirror."""
    nothing: Any = lambda *_: None  # noqa: E731
    owned = claim(folder, str(mirror), name)
    return Copier(folder, owned, retention, calls.get("on_bytes", nothing), calls.get("on_mirrored", nothing))


def copy_all(copier: Copier) -> None:
    """Copy everything."""
    while copier.copy_next(is_last=True):
        pass


def names_in(place: Path) -> set[str]:
    """The names of the files in a folder, relative to it."""
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
