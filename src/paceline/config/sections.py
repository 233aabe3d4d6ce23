"""The sections of a config, such as `optimizer` and `checkpoint`: their keys with types, defaults and descriptions.

The text below a key is its description in the documentation, in the JSON schema and in editors. It may contain links of
`docs/configuration.md`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.config.values import (
    Mode,
    Otherwise,
    PositiveNumber,
    false_as,
    listed,
    minutes_or_auto,
    mirror_place,
    path_as_text,
    with_mode,
)

DEFAULT_LRS = {"muon": 0.02}  # for optimizers whose usual learning rate is not near 1e-3


class Section(BaseModel):
    """A section of settings; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects true and false where a number is expected: pydantic would read them as 1 and 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and {int, float} & set(kinds) and not {bool, str} & set(kinds):
            raise ValueError("is not a number; write a number")
        return value


class Optimizer(Section):
    """An optimizer of torch.optim by name; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")

    name: str = "adamw"
    """The name of a class of `torch.optim`, in any case; or `muon` ([more](#the-optimizer))."""

    lr: Annotated[float, Otherwise("0.001, or 0.02 for `muon`")] = Field(1e-3, gt=0)
    """The learning rate. Further keys are the arguments of the optimizer, such as `weight_decay` and `betas`."""

    @model_validator(mode="before")
    @classmethod
    def _default_lr(cls, values: Any) -> Any:
        lr = DEFAULT_LRS.get(str(values.get("name")).lower()) if isinstance(values, dict) else None
        return values if lr is None else {"lr": lr, **values}


# The options of each schedule besides `name`, and their defaults; None: required.
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"warmup_steps": 0},
    "linear": {"warmup_steps": 0, "final": 0.0},
    "cosine": {"warmup_steps": 0, "final": 0.0},
    "exponential": {"warmup_steps": 0, "final": None},
    "onecycle": {"warmup_fraction": 0.3, "start": 0.04, "final": 0.0},
    "wsd": {"warmup_steps": 0, "decay_fraction": 0.2, "final": 0.0},
    "step": {"warmup_steps": 0, "every_epochs": None, "every_steps": None, "factor": 0.1},
    "plateau": {
        "warmup_steps": 0, "metric": "val_loss", "mode": "min", "patience": 5, "min_delta": 0.0, "factor": 0.1,
        "final": 0.0,
    },
}  # fmt: skip


ScheduleName = Literal["constant", "linear", "cosine", "exponential", "onecycle", "wsd", "step", "plateau"]


class Schedule(Section):
    """The learning rate over the run, as a fraction of the optimizer's."""

    name: ScheduleName = "constant"
    """The shape of the learning rate over the run ([each of them](#the-learning-rate))."""

    warmup_steps: int = Field(0, ge=0)
    """The number of steps of linear warm-up, with all schedules but `onecycle`."""

    warmup_fraction: Annotated[float | None, Otherwise("0.3")] = Field(None, gt=0, lt=1)
    """With `onecycle`: the fraction of the run in which the learning rate rises."""

    decay_fraction: Annotated[float | None, Otherwise("0.2")] = Field(None, gt=0, le=1)
    """With `wsd`: the last fraction of the run, in which the learning rate falls."""

    start: Annotated[float | None, Otherwise("0.04")] = Field(None, gt=0, le=1)
    """With `onecycle`: the first factor of the learning rate."""

    final: float = Field(0.0, ge=0, le=1)
    """The last factor of the learning rate; with `plateau` the smallest one. Required with `exponential`."""

    every_epochs: int | None = Field(None, ge=1)
    """With `step`: the number of epochs after which the learning rate is multiplied by `factor`."""

    every_steps: int | None = Field(None, ge=1)
    """With `step`: the same in steps, instead of `every_epochs`."""

    factor: Annotated[float | None, Otherwise("0.1")] = Field(None, gt=0, lt=1)
    """With `step` and `plateau`: the number by which the learning rate is multiplied each time."""

    metric: Annotated[str | None, Otherwise("`val_loss`")] = None
    """With `plateau`: the metric that must improve."""

    mode: Annotated[Mode | None, Otherwise("`min`")] = None
    """With `plateau`: `min` or `max`, whether lower or higher is better. Required unless the metric is a loss."""

    patience: Annotated[int | None, Otherwise("5")] = Field(None, ge=1)
    """With `plateau`: the number of evaluations to wait for an improvement."""

    min_delta: Annotated[float | None, Otherwise("0")] = Field(None, ge=0)
    """With `plateau`: smaller changes do not count as an improvement."""

    def option(self, key: str) -> Any:
        """The value of an option of this schedule, by default that of SCHEDULES."""
        value = getattr(self, key)
        return SCHEDULES[self.name][key] if value is None else value


class Normalize(Section):
    """Mean and standard deviation of pixels between 0 and 1: one number each, or one for each channel."""

    mean: list[float]
    """The mean of all pixels, or of each channel."""

    std: list[Annotated[float, Field(gt=0)]]
    """The standard deviation of all pixels, or of each channel."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Normalize:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("must have as many numbers in mean as in std, at least one; write one number per channel")
        return self


class Augmentation(Section):
    """Transforms of image batches on the device, before a step."""

    normalize: Normalize | None = None
    """`{mean: […], std: […]}`, also in evaluation and prediction, for pixels between 0 and 1.

    Bytes are divided by 255.
    """

    flip: Annotated[Literal["random", "alternating", "none"], false_as("none")] = "none"
    """Mirrors images, in training only. With `alternating` a sample is mirrored in every other epoch."""

    translate: int = Field(0, ge=0)
    """In training only, shifts by up to this number of pixels in each direction, with reflection at the edges."""

    cutout: int = Field(0, ge=0)
    """In training only, the side length of a square of zeros."""


class Pacing(Section):
    """A curriculum: the fraction of the samples, easiest first, that each epoch uses."""

    column: str | None = None
    """The difficulty: a column of `df`, with larger numbers for harder samples."""

    by: Literal["loss"] | None = None
    """The difficulty: the `loss` of each sample after the first epoch ([more](#a-curriculum-by-loss))."""

    start: float = Field(0.2, gt=0, le=1)
    """The fraction of samples in the first epoch."""

    epochs: int = Field(5, ge=1)
    """The number of epochs until all samples are used."""

    name: Literal["linear", "root", "step"] = "linear"
    """How the fraction grows: `linear`, `root` (fast at first) or `step` (all at once)."""


class EarlyStop(Section):
    """The metric whose lack of improvement ends the run, and the number of evaluations to wait for it."""

    metric: str = "val_loss"
    """The metric that must improve."""

    mode: Annotated[Mode | None, Otherwise("`min`")] = None
    """`min` or `max`, whether lower or higher is better. Required unless the metric is a loss."""

    patience: int = Field(5, ge=1)
    """The number of evaluations to wait for an improvement."""

    min_delta: float = Field(0.0, ge=0)
    """A smaller change is no improvement."""


class Evaluate(Section):
    """When the validation data is evaluated, and the batch size."""

    every_steps: int | None = Field(None, ge=1)
    """Also evaluates within an epoch, each time after this number of steps."""

    every_epochs: Annotated[int | None, Otherwise("1")] = Field(None, ge=1)
    """Evaluates at the end of every n-th epoch, and of the last one."""

    batch_size: Annotated[int | None, Otherwise("`batch_size`")] = Field(None, ge=1)
    """The number of samples that one device evaluates at once."""


class Log(Section):
    """How often and where metrics are logged."""

    every_steps: Annotated[int | None, Otherwise("every step at first, then less often")] = Field(None, ge=1)
    """How often the loss and [the values below](#logged-values-and-tensorboard) are written to `events.jsonl`.

    By default the loss of each of the first 200 steps is written, then the mean over every 2, 5, 10, … steps
    ([events](events.md#step)), and times and memory about once a second.
    """

    tensorboard: bool = True
    """False writes no TensorBoard files."""

    trackers: Annotated[list[str], BeforeValidator(listed, json_schema_input_type=str | list[str])] = []
    """`wandb`, `mlflow`, the name of an installed [sink](events.md#sending-events-elsewhere), or a list of names."""

    digests: bool = False
    """Adds a digest of every parameter."""


class Best(Section):
    """The metric that selects the checkpoint to keep besides the newest ones."""

    metric: str = "val_loss"
    """The metric by which checkpoints are compared."""

    mode: Mode = "min"
    """`min` or `max`, whether lower or higher is better. Required unless the metric is a loss."""


class Checkpoint(Section):
    """When checkpoints are saved, and how many are kept."""

    every_steps: int | None = Field(None, ge=1)
    """Saves each time after this number of steps."""

    every_minutes: Annotated[
        float | Literal["auto"] | None,
        BeforeValidator(minutes_or_auto, json_schema_input_type=PositiveNumber | Literal["auto"] | None),
    ] = "auto"
    """Saves each time after this number of minutes; null never does.

    `auto` saves every 10 minutes; more often, up to every minute, where that loses less time because there are many
    ranks or failures; less often where saves would cost more than 1 % of the time ([how often](goodput.md)).
    """

    keep: int = Field(3, ge=1)
    """The number of recent checkpoints to keep."""

    best: Annotated[Best | None, BeforeValidator(with_mode)] = None
    """`{metric: val_loss, mode: min}` also saves and keeps the best checkpoint by this metric."""

    is_async: bool = Field(True, alias="async")
    """False pauses training until a checkpoint is on the disk."""

    mirror: Annotated[str | None, BeforeValidator(path_as_text), BeforeValidator(mirror_place)] = None
    """A folder on another disk, or a URL such as `s3://bucket/runs`, to which the run is copied while it trains.

    Checkpoints, events and results are copied to `MIRROR/NAME/RUN FOLDER`, from which `--resume` restores the run on
    an empty machine ([mirror](mirror.md)). `s3`, `gs` and `sftp` need the extra of that name: `paceline[s3]`.
    """
