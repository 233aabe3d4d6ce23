"""What a run leaves behind: `result.json`, the weights, and the `Result` that `start()` returns."""

from __future__ import annotations

import json
import pickle
import platform
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from paceline.checkpoint.weights import load_weights, save_weights
from paceline.ema import Ema
from paceline.run_folder import RunFolder, write_json, write_private

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.trainer import Trainer


class Predictions(NamedTuple):
    """A model's outputs, and which samples of the user's data set they are of."""

    indices: np.ndarray[Any, np.dtype[np.int64]]
    outputs: torch.Tensor


class Trained:
    """Weights that a run has left, and what can be done with them."""

    run_dir: Path
    lanes: int
    _trainer: Trainer | None

    @property
    def weights(self) -> Path:
        """The file of the weights to use, or the checkpoint that holds them."""
        raise NotImplementedError

    @property
    def config(self) -> Config:
        """The config of the run."""
        assert self._trainer is not None
        return self._trainer.config

    @cached_property
    def model(self) -> torch.nn.Module:
        """The trained model on the CPU, ready to be used."""
        return self.load_model()

    def load_model(self) -> torch.nn.Module:
        """A new copy of the trained model on the CPU, without any wrapper, in evaluation mode."""
        assert self._trainer is not None
        model = self._trainer.make_model()
        load_weights(model, self.weights)
        return model.eval()

    def evaluate(self, df: Any = None, procs: int | None = None) -> dict[str, float]:
        """The loss and metrics on the validation data, or on that of `df`; equal at any number of processes."""
        assert self._trainer is not None
        metrics: dict[str, float] = self._trainer.apply("evaluate", self, df, procs)
        return metrics

    def predict(self, df: Any = None, procs: int | None = None) -> torch.Tensor:
        """The model's output for each sample of the validation data, or of `df`, in the order of the data set."""
        return self.predictions(df, procs).outputs

    def predictions(self, df: Any = None, procs: int | None = None) -> Predictions:
        """The same, with the indices that the samples have in the data set of `dataset_fn`."""
        assert self._trainer is not None
        predicted: Predictions = self._trainer.apply("predict", self, df, procs)
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
    value: Any = None
    _trainer: Trainer | None = field(default=None, repr=False, compare=False)

    @property
    def weights(self) -> Path:
        """The file of the weights to use: the average of the weights if the run kept one."""
        folder = RunFolder(self.run_dir)
        return folder.weights if self.ema_sha256 is None else folder.ema


def write(
    folder: RunFolder,
    model: torch.nn.Module,
    ema: Ema | None,
    value: Any,
    **facts: Any,
) -> None:
    """Leave the weights, what `train_fn` returned and `result.json`, in this order. Rank 0 only."""
    facts["weights_sha256"], facts["ema_sha256"] = save_weights(model, folder.weights), None
    if ema is not None:
        with ema.applied():
            facts["ema_sha256"] = save_weights(model, folder.ema)
    if value is not None:
        write_value(folder, value)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(folder.result, {**facts, "versions": versions})


def write_value(folder: RunFolder, value: Any) -> None:
    """Leave what a task returns to its caller. Rank 0 only."""
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        warnings.warn(f"what train_fn returned does not pickle, so result.value is None: {error}", stacklevel=2)
    else:
        write_private(folder.value, content)


@dataclass(frozen=True)
class Outcome:
    """What a task has left, as bytes, which any process can be sent: `result.json` and the pickled value."""

    run_dir: Path
    facts: str
    value: bytes | None
    stopped: str | None  # why and where, if the run was stopped on request

    def load_value(self) -> Any:
        """The value that rank 0 left."""
        try:
            return pickle.loads(self.value) if self.value is not None else None
        except Exception as error:  # noqa: BLE001 - any object may raise anything when it is made again
            warnings.warn(f"what train_fn returned does not unpickle, so result.value is None: {error}", stacklevel=2)
            return None

    def to_result(self, trainer: Trainer) -> Result:
        """The result for the caller of `start()`."""
        return Result(run_dir=self.run_dir, value=self.load_value(), _trainer=trainer, **json.loads(self.facts))


def collect(folder: RunFolder) -> Outcome:
    """What rank 0 has left in the run folder."""
    facts = folder.result.read_text(encoding="utf-8") if folder.result.exists() else "{}"
    stopped = folder.stopped.read_text(encoding="utf-8") if folder.stopped.exists() else None
    return Outcome(folder.path, facts, folder.value.read_bytes() if folder.value.exists() else None, stopped)
