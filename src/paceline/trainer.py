"""`Trainer`: the Python face of the config. It trains nothing itself."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import Config, build, resolve_tables, to_plain
from paceline.errors import ConfigError, PacelineError, RankFailed
from paceline.functions import Missing
from paceline.run_folder import new_folder
from paceline.startup import requests_noted

if TYPE_CHECKING:
    import torch

    from paceline.job import Task
    from paceline.result import Outcome, Result, Trained


class Trainer:
    """One run, ready to start. Every keyword is a config key; functions may be lambdas, closures or of a notebook."""

    def __init__(
        self,
        model_fn: Any = None,
        dataset_fn: Any = None,
        df: Any = None,
        train_fn: Any = None,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        **options: Any,
    ) -> None:
        named = {"model_fn": model_fn, "dataset_fn": dataset_fn, "df": df, "train_fn": train_fn}
        raw = {**named, "batch_size": batch_size, "num_epochs": num_epochs, **options}
        self.config: Config = build(raw)
        self._folder = Path()

    @classmethod
    def from_config(cls, config: Config, folder: Path) -> Trainer:
        """A trainer of a config that has been built already, from a file in `folder`."""
        trainer = cls.__new__(cls)
        trainer.config, trainer._folder = config, folder
        return trainer

    def start(self) -> Result:
        """Train, on as many ranks as the config says, and return the result; may be called again."""
        with requests_noted():
            from paceline import launch
            from paceline.telemetry import trackers

            trackers.check(self.config.log.trackers)
            launch.prepare(self.config.__dict__, self._folder)  # before torch is imported here, too
            from paceline.worker import train

        return self._launch(self.config, train).to_result(self)

    def make_model(self) -> torch.nn.Module:
        """A new model, as `model_fn` makes it."""
        from paceline.replica import make_model

        return make_model(self.config)

    def apply(self, task: Literal["evaluate", "predict"], trained: Trained, df: Any, procs: int | None) -> Any:
        """Evaluate a trained model or predict with it, on the ranks: on its validation data, or on that of `df`."""
        if problems := _obstacles(self.config, task, df):
            raise ConfigError(problems)
        from paceline import apply
        from paceline.launch.environment import chosen_threads, is_main_process

        # The threads of the run, whatever the number of processes now: sums inside an operator depend on them.
        threads = self.config.threads or chosen_threads(trained.lanes)
        changes: dict[str, Any] = {"lanes": None, "ddp": True, "threads": threads, "procs": procs or self.config.procs}
        changes |= {"resume": "never", "max_restarts": 0, "log": self.config.log.model_copy(update={"trackers": []})}
        changes |= {"nodes": None, "rendezvous": None}  # on this machine
        if self.config.launcher == "ray":
            changes["launcher"] = "local"
        if df is not None:
            changes |= {"df": df, "val_df": None, "val_dataset_fn": None, "val_fraction": 0.0}
        config = self.config.model_copy(update=changes)
        if problems := resolve_tables(config, self._folder):
            raise ConfigError(problems)
        if is_main_process():
            config.run_dir = _folder_for(task, trained.run_dir, config.name)
        function = functools.partial(getattr(apply, task), weights=trained.weights, is_whole=df is not None)
        try:
            return self._launch(config, function).load_value()
        except RankFailed as error:
            if df is None or not (lacking := _lacking_columns(error, self.config.df, config.df)):
                raise
            raise ConfigError(
                f"df={to_plain(df)} has no column {', '.join(lacking)}, as the run's own data has; add it"
            ) from None

    def _launch(self, config: Config, task: Task) -> Outcome:
        from paceline import launch
        from paceline.world import is_joined

        if is_joined():
            raise PacelineError("start() was called inside a rank; call it in the script that starts the run")
        return launch.start(config, task, self._folder)


def _folder_for(task: str, run_dir: Path, name: str) -> Path:
    """A new folder for what ranks do with a trained model: in that of the run, or here if that is read-only."""
    try:
        return new_folder(None, run_dir / task)
    except ConfigError:
        pass
    try:
        folder = new_folder(None, Path("runs") / name / task)
    except ConfigError:
        raise ConfigError(
            f"neither {run_dir} nor {Path().resolve()} can be written to; cd to a folder of yours"
        ) from None
    print(f"{run_dir} cannot be written to; logs are in {folder}", file=sys.stderr, flush=True)
    return folder


def _obstacles(config: Config, task: str, df: Any) -> list[str]:
    """Why a trained model cannot be used so, as far as it shows before a process starts."""
    if task == "evaluate" and config.loss_fn is None:
        return ["evaluate needs a loss_fn; a run with train_fn measures in its own loop"]
    needed = [config.model_fn, config.dataset_fn]
    if task == "evaluate":
        needed += [config.loss_fn, *(config.metrics.values() if isinstance(config.metrics, dict) else ())]
    if df is None:
        needed += [config.df, config.val_df, config.val_dataset_fn]
        if config.val_df is None and config.val_dataset_fn is None and not config.val_fraction:
            return ["the run held out no validation data; give the data to use"]
    missing = [each for each in needed if isinstance(each, Missing)]
    return [
        f"{', '.join(each.what for each in missing if each.why == why)} {why}"
        for why in dict.fromkeys(each.why for each in missing)
    ]


def _lacking_columns(error: RankFailed, trained_on: Any, given: Any) -> list[str]:
    """The columns that a run was trained on, that other data lacks, and that a rank has complained about."""
    from paceline.data.sources import columns_of

    if isinstance(trained_on, Missing):
        return []
    there = columns_of(given)
    return [name for name in columns_of(trained_on) if name not in there and f"'{name}'" in str(error)]
