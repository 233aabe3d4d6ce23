"""The types of `Trainer`'s keywords, for editors and type checkers; never loaded in a run.

A dict for a section of a config is typed by its keys, which are those of the section in `config/sections.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import numpy.typing as npt
import torch

from paceline.callbacks import Run
from paceline.config.phases import Every
from paceline.config.sections import ScheduleName
from paceline.config.values import Mode
from paceline.engine.losses import Sum


class Table(Protocol):
    """A DataFrame."""

    @property
    def columns(self) -> Any:
        """The names of its columns."""


class Samples(Protocol):
    """A map-style data set."""

    def __getitem__(self, index: Any, /) -> Any:
        """The sample at an index."""


class TrainWithRun(Protocol):
    """A `train_fn` with the parameter `run`."""

    def __call__(
        self, model: Any, train_loader: Any, val_loader: Any, device: torch.device, num_epochs: int, /, *, run: Run
    ) -> Any:
        """Train the model."""


# A function may also be given by its name, "module:name".
ModelFn = Callable[..., torch.nn.Module] | str
DatasetFn = Callable[..., Samples | Iterable[Any]] | str
TrainFn = TrainWithRun | Callable[[Any, Any, Any, torch.device, int], Any] | str
TableOrPath = Table | Path | str
CollateFn = Callable[[list[Any]], Any] | str
Numbers = Sequence[float] | torch.Tensor | npt.NDArray[Any]
Indices = Sequence[int] | torch.Tensor | npt.NDArray[Any]
SampleWeights = Numbers | Callable[[Any], Numbers] | str
OrderFn = Callable[[int, int], Indices] | str

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | int] | Sum
LossFn = Callable[[Any, Any], Loss] | str
StepFn = Callable[[Any, Any], Loss | Mapping[str, Any]] | str
StepFns = StepFn | Mapping[str, StepFn | Every]
EvaluateFn = Callable[[Any, Any], Mapping[str, Any]] | str
PredictFn = Callable[[Any, Any], torch.Tensor] | str
Metrics = str | Sequence[str] | Mapping[str, Callable[[Any, Any], Any] | str]
DifficultyFn = Callable[[Any], torch.Tensor | float] | str

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
OptimizerFn = Callable[[Any], Optimizers] | str
Scheduler = torch.optim.lr_scheduler.LRScheduler
ScheduleFn = Callable[[int, Any], float] | str
SchedulerFn = Callable[..., Scheduler | tuple[Scheduler, str]] | str


class ScheduleOptions(TypedDict, total=False):
    """The keys of `schedule`."""

    name: ScheduleName
    warmup_steps: int
    warmup_fraction: float | None
    decay_fraction: float | None
    start: float | None
    final: float
    every_epochs: int | None
    every_steps: int | None
    factor: float | None
    metric: str | None
    mode: Mode | None
    patience: int | None
    min_delta: float | None


class EarlyStopOptions(TypedDict, total=False):
    """The keys of `early_stop`."""

    metric: str
    mode: Mode | None
    patience: int
    min_delta: float


class EvaluateOptions(TypedDict, total=False):
    """The keys of `evaluate`."""

    every_steps: int | None
    every_epochs: int | None
    batch_size: int | None


class NormalizeOptions(TypedDict):
    """The keys of `augment.normalize`."""

    mean: Sequence[float]
    std: Sequence[float]


class AugmentOptions(TypedDict, total=False):
    """The keys of `augment`."""

    normalize: NormalizeOptions | None
    flip: Literal["random", "alternating", "none"]
    translate: int
    cutout: int


class CurriculumOptions(TypedDict, total=False):
    """The keys of `curriculum`."""

    column: str | None
    by: Literal["loss"] | None
    start: float
    epochs: int
    name: Literal["linear", "root", "step"]


class BestOptions(TypedDict, total=False):
    """The keys of `checkpoint.best`."""

    metric: str
    mode: Mode


CheckpointOptions = TypedDict(  # a class cannot have the key `async`
    "CheckpointOptions",
    {
        "every_steps": int | None,
        "every_minutes": float | Literal["auto"] | None,
        "keep": int,
        "best": BestOptions | None,
        "async": bool,
        "mirror": str | None,
    },
    total=False,
)


class LogOptions(TypedDict, total=False):
    """The keys of `log`."""

    every_steps: int | None
    tensorboard: bool
    trackers: str | Sequence[str]
    digests: bool
