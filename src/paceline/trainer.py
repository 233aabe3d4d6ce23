"""`Trainer`: the Python face of the config. It trains nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config, build
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.result import Result


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
        from paceline.replica import make_model
        from paceline.world import is_joined

        if is_joined():
            raise PacelineError("start() was called inside a rank; call it in the script that starts the run")
        outcome = launch.start(self.config, self._folder)
        return outcome.to_result(lambda: make_model(self.config))
