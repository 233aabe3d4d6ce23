"""Finds the run to resume for a config, if any, and checks whether a checkpoint matches the config."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from paceline.checkpoint.store import MANIFEST, DamagedCheckpoint, Store, read_manifest
from paceline.config import Config, to_plain
from paceline.config.keys import EXECUTION_KEYS
from paceline.data.trees import leaves_in
from paceline.engine.precision import resolve_precision
from paceline.errors import ConfigError
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked

# Values that define what a step is. Other values may change in the middle of a run; the changes are reported.
FIXED_VALUES = ("lanes", "samples", "config.batch_size", "config.seed", "config.ema")


@dataclass(frozen=True)
class RestorePoint:
    """The run folder to resume, and the values that its first launch determined."""

    run_dir: Path | None = None  # None: make a new folder
    settled: dict[str, Any] = field(default_factory=dict)  # lanes and threads of the first launch

    def lanes(self, config: Config) -> int | None:
        """The lanes of the run, None if not known yet; a ConfigError if the config gives another number."""
        settled = self.settled.get("lanes")
        if settled is not None and config.lanes is not None and settled != config.lanes:
            key = "lanes" if config.global_batch_size is None else "global_batch_size"
            given = "" if key == "lanes" else f"{key}={config.global_batch_size} gives "
            raise ConfigError(
                f"{given}lanes={config.lanes} but the run started with lanes={settled}; omit {key}, or start a new run"
            )
        return config.lanes or settled

    def threads(self, config: Config) -> int | None:
        """The threads of the run, None if not known yet."""
        return config.threads or self.settled.get("threads")


def find_restore_point(config: Config) -> RestorePoint:
    """Return the restore point of the run that `resume` refers to; an empty one for a new run."""
    if config.resume == "never":
        return RestorePoint()
    if config.resume != "auto":
        return _restore_point_at(Path(config.resume), config)
    if config.run_dir is not None:
        folder = RunFolder(config.run_dir.resolve())
        if not config.keeps_state and folder.has_result():  # a second run would overwrite the result
            raise ConfigError(
                f"run_dir={config.run_dir} contains a finished run, and a train_fn without `run` starts from the "
                "beginning; choose another folder or remove it"
            )
        return _restore_point_of(folder) if _is_run(folder) else RestorePoint()
    if not config.keeps_state:  # a train_fn without `run` writes no checkpoints to resume from
        return RestorePoint()
    parent = (Path("runs") / config.name).resolve()
    for path in sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []:
        folder = RunFolder(path)
        is_unfinished = _is_run(folder) and not folder.has_result() and not is_locked(folder)
        if is_unfinished and _read_settled(folder) is not None:
            return _restore_point_of(folder)
    return RestorePoint()


def named_checkpoint(resume: str) -> Path | None:
    """The checkpoint that `resume` names as the start of a new run; None if it does not name a checkpoint."""
    path = Path(resume).resolve()
    return path if resume not in ("auto", "never") and (path / MANIFEST).is_file() else None


def _restore_point_at(path: Path, config: Config) -> RestorePoint:
    """Return the restore point at a path: a run folder to resume, or a checkpoint to start a new run from."""
    if not path.exists():
        raise ConfigError(f"resume={path} does not exist; give a run folder, a checkpoint in it, auto or never")
    folder = RunFolder(path.resolve())
    if _is_run(folder):
        if config.run_dir is not None and config.run_dir.resolve() != folder.path:
            raise ConfigError(f"resume={path} and run_dir={config.run_dir} are different folders; keep one of them")
        return _restore_point_of(folder)
    try:
        identity = read_manifest(path).identity
    except DamagedCheckpoint as reason:
        raise ConfigError(
            f"resume={path} is neither a run folder nor a checkpoint that can be used: {reason}"
        ) from None
    return RestorePoint(settled=identity)


def _is_run(folder: RunFolder) -> bool:
    """Whether the folder belongs to a run, even if its config is missing."""
    return folder.config.exists() or folder.has_checkpoints()


def _restore_point_of(folder: RunFolder) -> RestorePoint:
    """Return the restore point of a run folder."""
    settled = _read_settled(folder)
    if settled is None:
        raise ConfigError(
            f"{folder.config} cannot be read, and there is no checkpoint to replace it; give another run folder"
        )
    return RestorePoint(folder.path, {key: settled.get(key) for key in ("lanes", "threads")})


def _read_settled(folder: RunFolder) -> dict[str, Any] | None:
    """Return the values of the first launch, from the config or the newest checkpoint; None if neither can be read."""
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        written = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        if isinstance(written, dict):
            return written
    for path in Store(folder.checkpoints).paths():
        with suppress(DamagedCheckpoint):
            return read_manifest(path).identity
    return None


# --- identity ------------------------------------------------------------------------------------------------------


def identity_of(config: Config, *, lanes: int, samples: int | None, device: torch.device) -> dict[str, Any]:
    """Return the identity of a run, which its checkpoints store: everything that affects its results."""
    resolved = {**config.__dict__, "precision": resolve_precision(config.precision, device)}
    if not config.callbacks:  # so that checkpoints of versions without callbacks have the same identity
        del resolved["callbacks"]
    values = {key: _with_text_keys(to_plain(value)) for key, value in resolved.items() if key not in EXECUTION_KEYS}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return {
        "config": values,
        "config_sha256": digest,
        "lanes": lanes,
        "samples": samples,
        "threads": config.threads,
        "device": device.type,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any], source: Path) -> list[str]:
    """Describe the changes since a checkpoint; raise a ConfigError if the run cannot be resumed with them."""
    before, after = _flatten(saved), _flatten(current)
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    problems = [
        f"{_name(key)}={after.get(key)} but {source} was saved with {_name(key)}={before.get(key)}; "
        f"use that value, or start a new run with --resume never"
        for key in changed
        if key in FIXED_VALUES
    ]
    if problems:
        raise ConfigError(problems)
    return [f"{_name(key)} {before.get(key)} → {after.get(key)}" for key in changed if key != "config_sha256"]


def _name(key: str) -> str:
    """Return the name of a value as a user writes it."""
    return key.removeprefix("config.")


def _with_text_keys(tree: Any) -> Any:
    """Return the tree with strings as keys, as JSON needs them; `model_args` may have other keys."""
    if isinstance(tree, dict):
        return {str(key): _with_text_keys(value) for key, value in tree.items()}
    return [_with_text_keys(value) for value in tree] if isinstance(tree, list) else tree


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one dict with dotted keys."""
    leaves = leaves_in(tree, is_leaf=lambda node: not isinstance(node, Mapping))
    return {".".join(map(str, path)): leaf for path, leaf in leaves}
