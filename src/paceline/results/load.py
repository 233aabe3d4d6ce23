"""A run found again in its folder: its config, its functions by name, and the weights of its end or of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from paceline.checkpoint.files import has_ema
from paceline.checkpoint.store import DamagedCheckpoint, Store, step_of, verify
from paceline.checkpoint.weights import stored_sha256
from paceline.config import FUNCTION_KEYS, Config, read_yaml
from paceline.config.functions import FunctionNotFound, Missing, full_name, resolve
from paceline.config.messages import problems_of
from paceline.engine.config_checks import unknown_names
from paceline.errors import ConfigError
from paceline.results.result import Trained
from paceline.results.trust import check
from paceline.run.layout import RunFolder
from paceline.run.result_file import ResultFile, read_result
from paceline.system.paths import is_file

INLINE = ("__main__:", "<", "()")  # in names of functions that no other program can find
IN_MEMORY = re.compile(r"<\w+>")  # what stands in a config for data
NOT_FOUND = (
    "cannot be found outside the script or notebook of the run; use result.evaluate() or result.predict() there, "
    "or give a config that names what is missing (--config FILE)"
)


@dataclass
class TrainedRun(Trained):
    """A run in its folder, with the weights that were asked for."""

    run_dir: Path
    source: Path
    origin: str  # which weights these are, in words
    step: int
    metrics: dict[str, float]  # as training measured them at that step, if it did
    lanes: int
    _config: Config | None = field(default=None, repr=False, compare=False)
    _folder: Path = field(default=Path(), repr=False, compare=False)

    @property
    def weights(self) -> Path:
        """The file of the weights to use, or the checkpoint that holds them."""
        return self.source

    def export(self, format: str, to: Path | str, data: Path | None = None) -> Path:
        """Write the model into the new folder `to`: as safetensors, torch, onnx or hf; compared before it counts."""
        from paceline.tools.export.export import export

        return export(self, format, to, data)


def load(
    run_dir: Path | str,
    checkpoint: str | int | None = None,
    config: Path | str | None = None,
    *,
    trust: bool = False,
) -> TrainedRun:
    """The run in a folder, to evaluate it, to predict, or to have its model.

    `checkpoint` is "best", "last" or a step; by default the best one if the run kept it, else the last weights. The
    averages of the weights are used if the run kept them. The keys in the file `config` take the place of the run's.
    The functions that the run names are imported: of a run of another user, or one that was moved, only with `trust`.
    """
    folder = open_folder(Path(run_dir))
    own, extra = read_yaml(folder.config), Path(config) if config is not None else None
    given = read_yaml(extra) if extra is not None else {}
    if not trust:
        check(folder, own, given, f"call paceline.load({str(run_dir)!r}, …, trust=True)")
    settings = _read_config(own, given, extra)
    facts = read_result(folder.result)
    choices = _choices(folder, settings, facts)
    name = str(checkpoint) if checkpoint is not None else next(iter(choices), "last")
    if name not in choices:
        there = f"there are {', '.join(choices)}" if choices else "it has neither ended nor saved a checkpoint"
        raise ConfigError(f"checkpoint={name} is not in {folder.path}; {there}")
    source = choices[name]
    step, metrics, is_average = _facts_of_end(facts) if facts and not source.is_dir() else _facts_of_checkpoint(source)
    run = TrainedRun(
        run_dir=folder.path,
        source=source,
        origin=_words(name, step, settings, is_done=facts is not None, is_average=is_average),
        step=step,
        metrics=metrics,
        lanes=settings.lanes or (facts.lanes if facts is not None else 0) or 1,
        _config=settings,
        _folder=settings.folder or folder.path,
    )
    if facts and not source.is_dir() and (fault := _fault_of_end(source, facts.ema_sha256 or facts.weights_sha256)):
        others = ", ".join(name for name in choices if name != "last")
        advice = (
            f"choose another with --checkpoint: {others}" if others else "the run has no checkpoint; train it again"
        )
        raise ConfigError(f"{source} cannot be used: {fault}; {advice}")
    return run


def open_folder(run_dir: Path) -> RunFolder:
    """The folder of a run; a ConfigError if it is none."""
    folder = RunFolder(run_dir.resolve())
    if not folder.config.exists():
        raise ConfigError(f"{run_dir} is not a run folder; give one such as runs/NAME/DATE-TIME")
    return folder


# --- which weights -------------------------------------------------------------------------------------------------


def _choices(folder: RunFolder, config: Config, facts: ResultFile | None) -> dict[str, Path]:
    """What `checkpoint` may be, the default first, and where those weights are: a checkpoint, or the last file."""
    store, best = Store(folder.checkpoints), config.checkpoint.best
    saved = {str(step_of(path)): path for path in store.paths()}
    best_path = store.best(best.metric, best.mode) if best is not None else None
    ended = (folder.weights if facts.ema_sha256 is None else folder.ema) if facts is not None else None
    named = {"best": best_path, "last": ended or next(iter(saved.values()), None)}
    return {name: path for name, path in named.items() if path is not None} | saved


def _facts_of_checkpoint(path: Path) -> tuple[int, dict[str, float], bool]:
    """Its step, its metrics, and whether it holds an average of the weights."""
    try:
        manifest = verify(path)
    except DamagedCheckpoint as reason:
        raise ConfigError(f"{path} cannot be used: {reason}; choose another with --checkpoint") from None
    measured = {name: value for name, value in manifest.metrics.items() if value is not None}
    return manifest.step, measured, has_ema(path)


def _facts_of_end(facts: ResultFile) -> tuple[int, dict[str, float], bool]:
    return facts.step, facts.metrics, facts.ema_sha256 is not None


def _fault_of_end(weights: Path, written: str) -> str | None:
    """What is wrong with the weights of a run's end, if they are not those that it has written."""
    try:
        is_same = stored_sha256(weights) == written
    except (OSError, SafetensorError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    return None if is_same else "its weights have another checksum than when they were written"


def _words(name: str, step: int, config: Config, *, is_done: bool, is_average: bool) -> str:
    best = config.checkpoint.best
    which = {"best": f"best by {best.metric}" if best else "", "last": "last" if is_done else "last so far"}.get(name)
    return f"step {step}{f' ({which})' if which else ''}{', the average of the weights (ema)' if is_average else ''}"


# --- the config and its functions ----------------------------------------------------------------------------------


def _read_config(own: Mapping[str, Any], given: Mapping[str, Any], extra: Path | None) -> Config:
    """The config of a run, with the keys of the file `extra` in place of its own. What is not found is `Missing`."""
    home = Path(own["folder"]) if isinstance(own.get("folder"), str) else None
    values = _found({key: value for key, value in own.items() if key not in given}, home)
    if extra is not None:
        values |= _found(given, extra.parent.resolve() / str(given.get("folder") or ""))
    # How the run was launched is no part of how its model is used.
    values |= {"launcher": "auto", "resume": "never", "run_dir": None, "time_limit": None, "callbacks": []}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(problems_of(error)) from None
    if problems := list(unknown_names(config)):
        raise ConfigError(problems)
    return config


def _found(raw: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The values of a config with its functions and the paths of its tables."""
    values = {str(key): value for key, value in raw.items()}
    for key in FUNCTION_KEYS:
        if isinstance(raw.get(key), str):
            values[key] = _function(key, raw[key], folder)
    if isinstance(raw.get("metrics"), dict):
        values["metrics"] = {
            name: _function(f"metrics.{name}", value, folder) if isinstance(value, str) else value
            for name, value in raw["metrics"].items()
        }
    for key in ("df", "val_df"):
        if isinstance(raw.get(key), str):
            values[key] = _table(key, raw[key], folder)
    for key, user in (("model_args", "model_fn"), ("dataset_args", "dataset_fn")):
        arguments = raw.get(key)
        for name, value in arguments.items() if isinstance(arguments, dict) else ():
            if isinstance(value, str) and IN_MEMORY.fullmatch(value):
                values[user] = Missing(f"{key}.{name}={value}", NOT_FOUND)
    return values


def _function(key: str, name: str, folder: Path | None) -> Any:
    try:
        return resolve(full_name(key, name), folder)
    except FunctionNotFound as reason:
        if any(mark in name for mark in INLINE):
            return Missing(f"{key}={name}", NOT_FOUND)
        return Missing(f"{key}={name}", f"{reason}; give a config that has it (--config FILE)")


def _table(key: str, name: str, folder: Path | None) -> Any:
    if IN_MEMORY.fullmatch(name):
        return Missing(
            f"{key}={name}", "was given in memory and is not in the run folder; give the data to use (--data)"
        )
    path = (folder or Path()) / name
    return path if is_file(path) else Missing(f"{key}={name}", "does not exist any more; give the data to use (--data)")
