"""`Result`, which `Trainer.start()` returns, and the methods that every trained model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.results.inference import run_inference
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome, Predictions, ReturnValue

if TYPE_CHECKING:
    import torch

    from paceline.tools.report.inline import Plot, Report


class TrainedModel:
    """The weights of a run: the trained model, its evaluation and its predictions."""

    run_dir: Path
    lanes: int
    _config: Config | None
    _folder: Path  # of a `.env` file, and of relative paths in the config

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
        """The trained model on the CPU, in evaluation mode; built on first access."""
        return self.load_model()

    def load_model(self) -> torch.nn.Module:
        """A new copy of the trained model on the CPU, without any wrapper, in evaluation mode."""
        from paceline.checkpoint.weights import load_weights
        from paceline.engine.replica import make_model

        model = make_model(self.config)
        load_weights(model, self.weights)
        return model.eval()

    def evaluate(self, df: Any = None, procs: int | None = None) -> dict[str, float]:
        """The loss and metrics on the validation data, or on `df`; identical for any number of processes."""
        metrics: dict[str, float] = run_inference("evaluate", self, self._folder, df, procs)
        return metrics

    def predict(self, df: Any = None, procs: int | None = None) -> torch.Tensor:
        """The model's outputs for the validation data, or for `df`, in the order of the data set."""
        return self.predictions(df, procs).outputs

    def predictions(self, df: Any = None, procs: int | None = None) -> Predictions:
        """The outputs of `predict`, with the index of each sample in the data set of `dataset_fn`."""
        predicted: Predictions = run_inference("predict", self, self._folder, df, procs)
        return predicted

    def plot(self, *others: TrainedModel | Path | str, names: Sequence[str] | None = None) -> Plot:
        """The curves of losses and metrics, or of `names`, for a notebook; `others` are drawn with them."""
        from paceline.tools.report.inline import plot_of

        return plot_of([_run_dir(each) for each in (self, *others)], names)

    def report(self, *others: TrainedModel | Path | str) -> Report:
        """The report of the run, for a notebook and written to the run folder; `others` are compared with it."""
        from paceline.tools.report.inline import report_of

        return report_of([_run_dir(each) for each in (self, *others)])


@dataclass
class Result(TrainedModel):
    """The metrics, history and weights of a finished run.

    Attributes:
        run_dir: The run folder.
        metrics: The values of the last evaluation, over all validation samples.
        history: One row for each epoch, from epoch 1.
        weights_sha256: The hash of the weights.
        ema_sha256: The hash of the average of the weights, if the run has one.
        optimizer_sha256: The hash of the optimizer state; None for a `train_fn` without `run`.
        step: The number of completed updates.
        epoch: The number of the last epoch.
        world_size: The number of processes when the run ended.
        lanes: The number of micro-batches in a step.
        seconds: The time of training, in seconds.
        samples: The number of samples that were trained on.
        versions: The versions of Paceline, Python and torch.
    """

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
        """The value that `train_fn` returned on rank 0; a pickle is loaded on first access."""
        return self._value.load() if self._value is not None else None

    @property
    def weights(self) -> Path:
        """The file of the weights to use: their average (ema) if the run has one."""
        folder = RunFolder(self.run_dir)
        return folder.weights if self.ema_sha256 is None else folder.ema


def _run_dir(run: TrainedModel | Path | str) -> Path:
    """The run folder of a result, or the folder itself."""
    return run.run_dir if isinstance(run, TrainedModel) else Path(run)


def result_of(outcome: Outcome, config: Config, folder: Path) -> Result:
    """The result of a run that was not stopped. Only `train_fn` returns a value."""
    assert outcome.facts is not None, "a run that was not stopped has a result"
    value = outcome.value if config.train_fn is not None else None
    return Result(run_dir=outcome.run_dir, _value=value, _config=config, _folder=folder, **dict(outcome.facts))
