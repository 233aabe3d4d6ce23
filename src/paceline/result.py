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
from paceline.result_file import ResultFile, read_result
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
    _value: Value | None = field(default=None, repr=False, compare=False)
    _trainer: Trainer | None = field(default=None, repr=False, compare=False)

    @cached_property
    def value(self) -> Any:
        """What `train_fn` returned on rank 0; a pickle is loaded when this is asked for the first time."""
        return self._value.load() if self._value is not None else None

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
    """Leave what a task returns to its caller: as JSON if it comes back as it is, else pickled. Rank 0 only."""
    text = _to_json(value)
    if text is not None:
        write_private(folder.value, text.encode())
        return
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        warnings.warn(f"what train_fn returned does not pickle, so result.value is None: {error}", stacklevel=2)
    else:
        write_private(folder.pickled_value, content)


def _to_json(value: Any) -> str | None:
    """A value as JSON; None if it would come back as something else."""
    try:
        return json.dumps(value) if _is_plain(value) else None
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return None


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the types: a tuple would come back as a list, a number of numpy as one of Python."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


@dataclass(frozen=True)
class Value:
    """What a task has returned, as the bytes of its file. A pickle is executed when it is loaded, and only then."""

    content: bytes
    is_pickled: bool

    def load(self) -> Any:
        """The value itself; None with a warning if it cannot be made again."""
        if not self.is_pickled:
            return json.loads(self.content)
        try:
            return pickle.loads(self.content)
        except Exception as error:  # noqa: BLE001 - any object may raise anything when it is made again
            warnings.warn(f"what train_fn returned does not unpickle, so result.value is None: {error}", stacklevel=2)
            return None


@dataclass(frozen=True)
class Outcome:
    """What a task has left, which any process can be sent: `result.json` and the value."""

    run_dir: Path
    facts: ResultFile | None
    value: Value | None
    stopped: str | None  # why and where, if the run was stopped on request

    def load_value(self) -> Any:
        """The value that rank 0 left."""
        return self.value.load() if self.value is not None else None

    def to_result(self, trainer: Trainer) -> Result:
        """The result for the caller of `start()`. The managed loop returns no value."""
        assert self.facts is not None, "a run that was not stopped has a result"
        value = self.value if trainer.config.train_fn is not None else None
        return Result(run_dir=self.run_dir, _value=value, _trainer=trainer, **dict(self.facts))


def collect(folder: RunFolder) -> Outcome:
    """What rank 0 has left in the run folder since the ranks started."""
    stopped = folder.stopped.read_text(encoding="utf-8") if folder.stopped.exists() else None
    is_pickled = folder.pickled_value.exists()
    path = folder.pickled_value if is_pickled else folder.value
    value = Value(path.read_bytes(), is_pickled) if path.exists() else None
    return Outcome(folder.path, read_result(folder.result), value, stopped)
