"""Loads a run from its folder: its config, its functions by name, and its final weights or those of a checkpoint."""

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
from paceline.config.functions import FunctionNotFound, Missing, full_name, is_model_loss, resolve
from paceline.config.messages import problems_of
from paceline.config.phases import map_functions, with_every
from paceline.engine.config_checks import unknown_names
from paceline.errors import ConfigError
from paceline.mirror.reading import fetch_weights, folder_of_run
from paceline.results.result import TrainedModel
from paceline.results.trust import check
from paceline.run.layout import RunFolder
from paceline.run.result_file import ResultFile, read_result
from paceline.system.paths import is_file

INLINE = ("__main__:", "<", "()")  # parts of names of functions that no other program can import
IN_MEMORY = re.compile(r"<\w+>")  # the type of a value that config.yaml cannot hold, such as <DataFrame>
NOT_FOUND = (
    "cannot be found outside the script or notebook of the run; use result.evaluate() or result.predict() there, "
    "or pass a config that names what is missing (--config FILE)"
)


@dataclass
class TrainedRun(TrainedModel):
    """A run loaded from its folder, with the requested weights."""

    run_dir: Path
    source: Path
    origin: str  # a description of the weights, such as "step 9 (last)"
    step: int
    metrics: dict[str, float]  # measured in training at that step, if any
    lanes: int
    _config: Config | None = field(default=None, repr=False, compare=False)
    _folder: Path = field(default=Path(), repr=False, compare=False)

    @property
    def weights(self) -> Path:
        """The file of the weights to use, or the checkpoint that holds them."""
        return self.source

    def export(self, format: str, to: Path | str, data: Path | None = None) -> Path:
        """Export the model as safetensors, torch, onnx or hf into a new folder, after a comparison of its outputs."""
        from paceline.tools.export.export import export

        return export(self, format, to, data)


def load(
    run_dir: Path | str,
    checkpoint: str | int | None = None,
    config: Path | str | None = None,
    *,
    trust: bool = False,
) -> TrainedRun:
    """Load the run in a folder or at the URL of a mirror, to evaluate it, to predict with it, or to get its model.

    `checkpoint` is "best", "last" or a step; by default the best checkpoint if the run kept one, else the last weights.
    The average of the weights (ema) is used if the run has one. The keys in the file `config` replace those of the run.
    The functions that the run names are imported; for a run of another user, or one that was moved, only with `trust`.
    """
    folder = open_folder(folder_of_run(run_dir))
    own, extra = read_yaml(folder.config), Path(config) if config is not None else None
    given = read_yaml(extra) if extra is not None else {}
    if not trust:
        check(folder, own, given, f"call paceline.load({str(run_dir)!r}, …, trust=True)")
    settings = _read_config(own, given, extra)
    facts = read_result(folder.result)
    choices = _choices(folder, settings, facts)
    name = str(checkpoint) if checkpoint is not None else next(iter(choices), "last")
    if name not in choices:
        hint = f"choose from {', '.join(choices)}" if choices else "the run has no result and no checkpoint"
        raise ConfigError(f"checkpoint={name} is not in {folder.path}; {hint}")
    source = choices[name]
    fetch_weights(folder, source)
    if facts is not None and not source.is_dir():
        _check_final_weights(source, facts, [name for name in choices if name != "last"])
        step, metrics, is_average = facts.step, facts.metrics, facts.ema_sha256 is not None
    else:
        step, metrics, is_average = _checkpoint_facts(source)
    return TrainedRun(
        run_dir=folder.path,
        source=source,
        origin=_description(name, step, settings, is_done=facts is not None, is_average=is_average),
        step=step,
        metrics=metrics,
        lanes=settings.lanes or (facts.lanes if facts is not None else 0) or 1,
        _config=settings,
        _folder=settings.folder or folder.path,
    )


def open_folder(run_dir: Path) -> RunFolder:
    """The run folder at a path; raises ConfigError if there is none."""
    folder = RunFolder(run_dir.resolve())
    if not folder.config.exists():
        raise ConfigError(f"{run_dir} is not a run folder; give one, such as runs/NAME/DATE-TIME")
    return folder


# --- which weights -------------------------------------------------------------------------------------------------


def _choices(folder: RunFolder, config: Config, facts: ResultFile | None) -> dict[str, Path]:
    """The valid values of `checkpoint`, the default first, each with a checkpoint or the file of the final weights."""
    store, best = Store(folder.checkpoints), config.checkpoint.best
    saved = {str(step_of(path)): path for path in store.paths()}
    best_path = store.best(best.metric, best.mode) if best is not None else None
    final = (folder.weights if facts.ema_sha256 is None else folder.ema) if facts is not None else None
    named = {"best": best_path, "last": final or next(iter(saved.values()), None)}
    return {name: path for name, path in named.items() if path is not None} | saved


def _checkpoint_facts(path: Path) -> tuple[int, dict[str, float], bool]:
    """The step and metrics of a checkpoint, and whether it has an average of the weights."""
    try:
        manifest = verify(path)
    except DamagedCheckpoint as reason:
        raise ConfigError(f"{path} cannot be used: {reason}; choose another with --checkpoint") from None
    measured = {name: value for name, value in manifest.metrics.items() if value is not None}
    return manifest.step, measured, has_ema(path)


def _check_final_weights(path: Path, facts: ResultFile, others: list[str]) -> None:
    """Raise ConfigError unless the file has the weights of the result; `others` are checkpoints to use instead."""
    try:
        if stored_sha256(path) == (facts.ema_sha256 or facts.weights_sha256):
            return
        fault = "its weights have another checksum than when they were written"
    except (OSError, SafetensorError) as error:
        fault = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    listed = ", ".join(others)
    advice = f"choose another with --checkpoint: {listed}" if others else "the run has no checkpoint; train it again"
    raise ConfigError(f"{path} cannot be used: {fault}; {advice}")


def _description(name: str, step: int, config: Config, *, is_done: bool, is_average: bool) -> str:
    """A description of the weights, such as "step 9 (best by accuracy), the average of the weights (ema)"."""
    best = config.checkpoint.best
    which = {"best": f"best by {best.metric}" if best else "", "last": "last" if is_done else "last so far"}.get(name)
    return f"step {step}{f' ({which})' if which else ''}{', the average of the weights (ema)' if is_average else ''}"


# --- the config and its functions ----------------------------------------------------------------------------------


def _read_config(own: Mapping[str, Any], given: Mapping[str, Any], extra: Path | None) -> Config:
    """The config of a run, with the keys of the file `extra` replacing its own."""
    home = Path(own["folder"]) if isinstance(own.get("folder"), str) else None
    values = _resolved({key: value for key, value in own.items() if key not in given}, home)
    if extra is not None:
        values |= _resolved(given, extra.parent.resolve() / str(given.get("folder") or ""))
    # These keys are about the training of the run, not about its model.
    values |= {"launcher": "auto", "resume": "never", "run_dir": None, "time_limit": None, "callbacks": []}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(problems_of(error, values)) from None
    if problems := list(unknown_names(config)):
        raise ConfigError(problems)
    return config


def _resolved(raw: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The values of a config with functions and paths of tables in place of names; `Missing` for unknown names."""
    values = {str(key): value for key, value in raw.items()}
    for key in FUNCTION_KEYS:
        if (value := raw.get(key)) is not None:
            named = with_every(value)
            values[key] = map_functions(named, lambda name, function: _function(name, function, folder), key)
    if isinstance(raw.get("metrics"), dict):
        values["metrics"] = {
            name: _function(f"metrics.{name}", value, folder) for name, value in raw["metrics"].items()
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


def _function(key: str, name: Any, folder: Path | None) -> Any:
    if not isinstance(name, str) or is_model_loss(key, name):
        return name
    try:
        return resolve(full_name(key, name), folder)
    except FunctionNotFound as reason:
        if any(mark in name for mark in INLINE):
            return Missing(f"{key}={name}", NOT_FOUND)
        return Missing(f"{key}={name}", f"{reason}; pass a config that has it (--config FILE)")


def _table(key: str, name: str, folder: Path | None) -> Any:
    if IN_MEMORY.fullmatch(name):
        return Missing(
            f"{key}={name}", "was given in memory and is not in the run folder; pass the data to use (--data)"
        )
    path = (folder or Path()) / name
    return path if is_file(path) else Missing(f"{key}={name}", "no longer exists; pass the data to use (--data)")
