"""Which run a config means: a new one, or one that exists and goes on; and whether the two still fit together."""

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

from paceline.checkpoint.store import MANIFEST, Damaged, Store, read_manifest
from paceline.config import Config, to_plain
from paceline.data.trees import leaves_in
from paceline.errors import ConfigError
from paceline.run.folder import RunFolder

# Keys that do not decide what a run computes, only how, where and how safely.
EXECUTION_KEYS = {
    "name", "run_dir", "launcher", "procs", "nodes", "rendezvous", "max_restarts", "hang_timeout_s", "device",
    "backend", "log", "checkpoint", "resume", "time_limit", "workers", "nan_limit", "check_replicas_every", "ddp",
    "bucket_mb", "static_graph", "lanes", "threads", "data_on_device", "shard_optimizer", "folder",
}  # fmt: skip
# What gives the step number its meaning. All else may change in the middle of a run, and is told.
FIXED = ("lanes", "samples", "config.batch_size", "config.seed", "config.ema")


@dataclass(frozen=True)
class RestorePoint:
    """What a run that goes on has settled already."""

    run_dir: Path | None = None  # the folder to go on in; None for a new one
    settled: dict[str, Any] = field(default_factory=dict)  # lanes and threads, from the first launch

    def lanes(self, config: Config) -> int | None:
        """The lanes of the run, if they are known; a ConfigError if the config asks for others."""
        then = self.settled.get("lanes")
        if then is not None and config.lanes is not None and then != config.lanes:
            raise ConfigError(
                f"lanes={config.lanes} but the run began with lanes={then}; leave lanes out, or begin a new run"
            )
        return config.lanes or then

    def threads(self, config: Config) -> int | None:
        """The threads of the run, if they are known."""
        return config.threads or self.settled.get("threads")


def find_restore_point(config: Config) -> RestorePoint:
    """The past of the run that `resume` means; an empty one for a new run."""
    if config.resume == "never":
        return RestorePoint()
    if config.resume != "auto":
        return _named(Path(config.resume), config)
    if config.run_dir is not None:
        folder = RunFolder(config.run_dir.resolve())
        if config.train_fn is not None and folder.has_result():  # a second attempt would overwrite the result
            raise ConfigError(
                f"run_dir={config.run_dir} holds a finished run, and train_fn can only start from the beginning; "
                "choose another folder or remove it"
            )
        return _past_of(folder) if _is_run(folder) else RestorePoint()
    if config.train_fn is not None:  # an earlier attempt has nothing to continue from
        return RestorePoint()
    parent = (Path("runs") / config.name).resolve()
    for path in sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []:
        folder = RunFolder(path)
        is_unfinished = _is_run(folder) and not folder.has_result() and not folder.is_locked()
        if is_unfinished and _settled_in(folder) is not None:
            return _past_of(folder)
    return RestorePoint()


def named_checkpoint(resume: str) -> Path | None:
    """The checkpoint that `resume` names, to begin a new run from."""
    path = Path(resume).resolve()
    return path if resume not in ("auto", "never") and (path / MANIFEST).is_file() else None


def _named(path: Path, config: Config) -> RestorePoint:
    if not path.exists():
        raise ConfigError(f"resume={path} does not exist; give a run folder, a checkpoint in it, auto or never")
    folder = RunFolder(path.resolve())
    if _is_run(folder):
        if config.run_dir is not None and config.run_dir.resolve() != folder.path:
            raise ConfigError(f"resume={path} and run_dir={config.run_dir} are two folders; keep one of them")
        return _past_of(folder)
    try:
        identity = read_manifest(path).identity
    except Damaged as reason:
        raise ConfigError(
            f"resume={path} is neither a run folder nor a checkpoint that can be used: {reason}"
        ) from None
    return RestorePoint(settled=identity)


def _is_run(folder: RunFolder) -> bool:
    """Whether a run has begun here, even if its config is missing now."""
    return folder.config.exists() or folder.has_checkpoints()


def _past_of(folder: RunFolder) -> RestorePoint:
    settled = _settled_in(folder)
    if settled is None:
        raise ConfigError(
            f"{folder.config} cannot be read, and no checkpoint says what it held; give another run folder"
        )
    return RestorePoint(folder.path, {key: settled.get(key) for key in ("lanes", "threads")})


def _settled_in(folder: RunFolder) -> dict[str, Any] | None:
    """What the first launch has settled, by the config or by the newest checkpoint; None if neither can be read."""
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        written = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        if isinstance(written, dict):
            return written
    for path in Store(folder.checkpoints).paths():
        with suppress(Damaged):
            return read_manifest(path).identity
    return None


# --- identity ------------------------------------------------------------------------------------------------------


def identity_of(config: Config, *, lanes: int, samples: int | None, device: torch.device) -> dict[str, Any]:
    """What a checkpoint says of its run: everything that decides what the run computes."""
    plain = {
        key: _with_text_keys(to_plain(value)) for key, value in config.__dict__.items() if key not in EXECUTION_KEYS
    }
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return {
        "config": plain,
        "config_sha256": digest,
        "lanes": lanes,
        "samples": samples,
        "threads": config.threads,
        "device": device.type,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def check_compatible(then: Mapping[str, Any], now: Mapping[str, Any], source: Path) -> list[str]:
    """What has changed since a checkpoint, in words; a ConfigError if the run cannot go on so."""
    before, after = _flat(then), _flat(now)
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    problems = [
        f"{_name(key)}={after.get(key)} but {source} was made with {_name(key)}={before.get(key)}; "
        f"keep that, or begin a new run with --resume never"
        for key in changed
        if key in FIXED
    ]
    if problems:
        raise ConfigError(problems)
    return [f"{_name(key)} {before.get(key)} → {after.get(key)}" for key in changed if key != "config_sha256"]


def _name(key: str) -> str:
    return key.removeprefix("config.")


def _with_text_keys(tree: Any) -> Any:
    """JSON knows no other keys; `model_args` may."""
    if isinstance(tree, dict):
        return {str(key): _with_text_keys(value) for key, value in tree.items()}
    return [_with_text_keys(value) for value in tree] if isinstance(tree, list) else tree


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    leaves = leaves_in(tree, is_leaf=lambda node: not isinstance(node, Mapping))
    return {".".join(map(str, path)): leaf for path, leaf in leaves}
