"""Starts ranks that evaluate a trained model or predict with it, on the validation data of its run or on other data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline import launch
from paceline.config import Config, resolve_tables, to_plain
from paceline.config.functions import Missing
from paceline.config.phases import functions_in
from paceline.errors import ConfigError, RankFailed
from paceline.launch.environment import is_main_process
from paceline.run.job import Task
from paceline.run.lifecycle import new_folder
from paceline.system.cores import chosen_threads

if TYPE_CHECKING:
    from paceline.results.result import TrainedModel


def run_inference(
    task: Literal["evaluate", "predict"], trained: TrainedModel, folder: Path, df: Any, procs: int | None
) -> Any:
    """Evaluate a trained model or predict with it on new ranks, on the run's validation data or on `df`.

    `folder` is that of a `.env` file, and of relative paths in the config.
    """
    config = trained.config
    if problems := _problems(config, task, df):
        raise ConfigError(problems)
    changed = _inference_config(config, trained.lanes, df, procs)
    if problems := resolve_tables(changed, folder):
        raise ConfigError(problems)
    if is_main_process():
        changed.run_dir = _folder_for(task, trained.run_dir, config.name)
    named = Task(f"paceline.worker.inference:{task}", {"weights": trained.weights, "is_whole": df is not None})
    try:
        return launch.start(changed, named, folder).load_value()
    except RankFailed as error:
        if df is None or not (missing := _missing_columns(error, config.df, changed.df)):
            raise
        raise ConfigError(
            f"df={to_plain(df)} has no column {', '.join(missing)}, which the run was trained with; add it"
        ) from None


def _inference_config(config: Config, lanes: int, df: Any, procs: int | None) -> Config:
    """The config of a run, changed for inference on this machine."""
    # The number of threads of the run, at any number of processes: sums inside an operator depend on it.
    threads = config.threads or chosen_threads(lanes)
    changes: dict[str, Any] = {"lanes": None, "ddp": True, "threads": threads, "procs": procs or config.procs}
    changes |= {"resume": "never", "max_restarts": 0, "log": config.log.model_copy(update={"trackers": []})}
    changes |= {"nodes": None, "rendezvous": None, "checkpoint": config.checkpoint.model_copy(update={"mirror": None})}
    if config.launcher == "ray":
        changes["launcher"] = "local"
    if df is not None:
        changes |= {"df": df, "val_df": None, "val_dataset_fn": None, "val_fraction": 0.0}
    return config.model_copy(update=changes)


def _folder_for(task: str, run_dir: Path, name: str) -> Path:
    """A new folder for the ranks' logs: inside the run folder, or in the working folder if that is read-only."""
    try:
        return new_folder(None, run_dir / task)
    except ConfigError:
        pass
    try:
        folder = new_folder(None, Path("runs") / name / task)
    except ConfigError:
        raise ConfigError(
            f"neither {run_dir} nor {Path().resolve()} can be written to; change to a writable folder"
        ) from None
    print(f"{run_dir} cannot be written to; logs are in {folder}", file=sys.stderr, flush=True)
    return folder


def _problems(config: Config, task: str, df: Any) -> list[str]:
    """The reasons why the task cannot run that are known before a process starts."""
    measures = [config.loss_fn, *functions_in(config.step_fn)]
    if config.evaluate_fn is not None:
        measures = [config.evaluate_fn]
    if task == "evaluate" and not any(value is not None for value in measures):
        return [
            "evaluate needs evaluate_fn(model, batch), or loss_fn and metrics: a run with train_fn computes its "
            "metrics in train_fn; if another config has these keys, give it with --config config.yaml"
        ]
    needed = [config.model_fn, config.dataset_fn, config.collate_fn]
    if task == "predict":
        needed += [config.predict_fn]
    if task == "evaluate":
        needed += [*measures, *(config.metrics.values() if isinstance(config.metrics, dict) else ())]
    if df is None:
        needed += [config.df, config.val_df, config.val_dataset_fn]
        if config.val_df is None and config.val_dataset_fn is None and not config.val_fraction:
            return ["the run has no validation data; pass the data to use"]
    missing = [value for value in needed if isinstance(value, Missing)]
    return [
        f"{', '.join(value.what for value in missing if value.why == why)} {why}"
        for why in dict.fromkeys(value.why for value in missing)
    ]


def _missing_columns(error: RankFailed, trained_on: Any, given: Any) -> list[str]:
    """The columns of the training data that are missing in the given data and that the rank's error names."""
    from paceline.data.sources import columns_of

    if isinstance(trained_on, Missing):
        return []
    columns = columns_of(given)
    return [name for name in columns_of(trained_on) if name not in columns and f"'{name}'" in str(error)]
