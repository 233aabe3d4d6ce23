"""Run folders without any training: created, filled with events and checkpoints; and the events of real runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import split_into_files, write_values
from paceline.checkpoint.state import CheckpointState
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.run import tensor_files
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run


def create_run(config: Config) -> RunFolder:
    """Create the folder of a new run, with its config in it, as a launch that has ended leaves it."""
    with open_run(config, None) as folder:
        return folder


def write_run(path: Path, *events: dict[str, Any], config: str = "name: lab\n", tail: str = "") -> RunFolder:
    """Write a run folder with this config and these events, one second apart; `tail` follows the last event."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": 1000.0 + n, **event}) + "\n" for n, event in enumerate(events)]
    folder = RunFolder(path)
    folder.events.write_text("".join(lines) + tail)
    folder.config.write_text(config)
    return folder


def save_checkpoint(
    folder: RunFolder, step: int, state: CheckpointState, identity: dict[str, Any], metrics: Mapping[str, float]
) -> Path:
    """Publish a checkpoint as a single rank does."""
    store = Store(folder.checkpoints)
    partial = store.partial(step)
    partial.mkdir(parents=True)
    written = [
        tensor_files.write_tensors(
            partial / file.name, {name: state.groups[file.group][name] for name in file.tensor_names}
        )
        for file in split_into_files(state)
    ]
    return store.publish(step, [*written, write_values(partial, state)], identity, metrics)


def events_of(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run folder, all of them or those of one kind. Each line must be complete and without a NaN."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=_refuse_constant) for line in lines]
    return [event for event in events if kind in (None, event["event"])]


def warnings_in(run_dir: Path) -> list[str]:
    """The texts of the warnings of a run."""
    return [event["text"] for event in events_of(run_dir, "warning")]


def _refuse_constant(constant: str) -> None:
    raise AssertionError(f"{constant} in events.jsonl")
