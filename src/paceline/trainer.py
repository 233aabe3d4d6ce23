"""`Trainer`: the Python face of the config. It trains nothing itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import Config, build, resolve_tables
from paceline.errors import ConfigError, PacelineError
from paceline.run_folder import new_folder

if TYPE_CHECKING:
    import torch

    from paceline.job import Task
    from paceline.result import Outcome, Result


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
        from paceline import launch

        launch.prepare(self.config, self._folder)  # before torch is imported here, too
        from paceline.worker import train

        return self._launch(self.config, train).to_result(self)

    def make_model(self) -> torch.nn.Module:
        """A new model, as `model_fn` makes it."""
        from paceline.replica import make_model

        return make_model(self.config)

    def apply(self, task: Literal["evaluate", "predict"], result: Result, df: Any, procs: int | None) -> Any:
        """Evaluate a result or predict with it, on the ranks: on its validation data, or on that of `df`."""
        from paceline import apply
        from paceline.launch.environment import chosen_threads

        if task == "evaluate" and self.config.loss_fn is None:
            raise ConfigError("evaluate needs a loss_fn; a run with train_fn measures in its own loop")
        # The threads of the run, whatever the number of processes now: sums inside an operator depend on them.
        threads = self.config.threads or chosen_threads(result.lanes)
        changes: dict[str, Any] = {"lanes": None, "ddp": True, "threads": threads, "procs": procs or self.config.procs}
        changes |= {"resume": "never", "max_restarts": 0}
        if df is not None:
            changes |= {"df": df, "val_df": None, "val_dataset_fn": None, "val_fraction": 0.0}
        config = self.config.model_copy(update=changes)
        if problems := resolve_tables(config, self._folder):
            raise ConfigError(problems)
        config.run_dir = new_folder(None, result.run_dir / task)
        function = functools.partial(getattr(apply, task), weights=result.weights, is_whole=df is not None)
        return self._launch(config, function).load_value()

    def _launch(self, config: Config, task: Task) -> Outcome:
        from paceline import launch
        from paceline.world import is_joined

        if is_joined():
            raise PacelineError("start() was called inside a rank; call it in the script that starts the run")
        return launch.start(config, task, self._folder)
