"""`Result`, which `start()` returns, and what can be done with the weights of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.weights import load_weights
from paceline.config import Config
from paceline.engine.replica import make_model
from paceline.results.apply import apply
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome, Predictions, ReturnValue


class Trained:
    """Weights that a run has left, and what can be done with them."""

    run_dir: Path
    lanes: int
    _config: Config | None
    _folder: Path  # where relative paths of the config and a `.env` file are looked for

    @property
    def weights(self) -> Path:
        """The file of the weights to use, or the checkpoint that holds them."""
        raise NotImplementedError

    @property
    def config(self) -> Config:
        """The config of the run."""
        assert self._config is not None
        return self._config

    @cached_property
    def model(self) -> torch.nn.Module:
        """The trained model on the CPU, ready to be used."""
        return self.load_model()

    def load_model(self) -> torch.nn.Module:
        """A new copy of the trained model on the CPU, without any wrapper, in evaluation mode."""
        model = make_model(self.config)
        load_weights(model, self.weights)
        return model.eval()

    def evaluate(self, df: Any = None, procs: int | None = None) -> dict[str, float]:
        """The loss and metrics on the validation data, or on that of `df`; equal at any number of processes."""
        metrics: dict[str, float] = apply("evaluate", self.config, self._folder, self, df, procs)
        return metrics

    def predict(self, df: Any = None, procs: int | None = None) -> torch.Tensor:
        """The model's output for each sample of the validation data, or of `df`, in the order of the data set."""
        return self.predictions(df, procs).outputs

    def predictions(self, df: Any = None, procs: int | None = None) -> Predictions:
        """The same, with the indices that the samples have in the data set of `dataset_fn`."""
        predicted: Predictions = apply("predict", self.config, self._folder, self, df, procs)
        return predicted


@dataclass
class Result(Trained):
    """The outcome of a run."""

    run_dir: Path
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    weights_sha256: str
    ema_sha256: str | None
    optimizer_sha256: str | None
    step: int
    epoch: int
    world_size: int
    lanes: int
    seconds: float
    samples: int
    versions: dict[str, str]
    _value: ReturnValue | None = field(default=None, repr=False, compare=False)
    _config: Config | None = field(default=None, repr=False, compare=False)
    _folder: Path = field(default=Path(), repr=False, compare=False)

    @cached_property
    def value(self) -> Any:
        """What `train_fn` returned on rank 0; a pickle is loaded when this is asked for the first time."""
        return self._value.load() if self._value is not None else None

    @property
    def weights(self) -> Path:
        """The file of the weights to use: the average of the weights if the run kept one."""
        folder = RunFolder(self.run_dir)
        return folder.weights if self.ema_sha256 is None else folder.ema


def result_of(outcome: Outcome, config: Config, folder: Path) -> Result:
    """The result for the caller of `start()`. The managed loop returns no value."""
    assert outcome.facts is not None, "a run that was not stopped has a result"
    value = outcome.value if config.train_fn is not None else None
    return Result(run_dir=outcome.run_dir, _value=value, _config=config, _folder=folder, **dict(outcome.facts))
