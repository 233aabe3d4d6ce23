"""The keys of a config, with their types, defaults and limits. The class `Config` is the list of all keys."""

from __future__ import annotations

import inspect
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.config.functions import is_object
from paceline.config.phases import with_every
from paceline.config.written import Origin
from paceline.config.yaml import dump_yaml, to_plain
from paceline.system.paths import problem_with

Function = Callable[..., Any] | str
Mode = Literal["min", "max"]  # whether lower or higher values of a metric are better
FUNCTION_KEYS = (
    "model_fn", "dataset_fn", "val_dataset_fn", "collate_fn", "train_fn", "loss_fn", "step_fn", "evaluate_fn",
    "predict_fn", "optimizer_fn", "schedule_fn", "scheduler_fn", "difficulty_fn", "order_fn",
)  # fmt: skip
TABLE_KEYS = ("df", "val_df")
NAMED_SECTIONS = ("optimizer", "schedule")  # may be given by name alone
MANAGED_KEYS = (  # have no effect on a train_fn without `run`
    "metrics", "optimizer", "optimizer_fn", "schedule", "schedule_fn", "scheduler_fn", "early_stop", "evaluate",
    "clip_norm", "ema", "max_steps", "lanes", "global_batch_size", "precision", "exact", "check_replicas_every",
    "checkpoint", "time_limit", "nan", "nan_limit", "augment",
    "curriculum", "difficulty_fn", "callbacks", "step_mode", "data_on_device", "compression", "shard_optimizer",
)  # fmt: skip
OWN_LOOP_KEYS = (  # belong to the managed loop, but also work in a train_fn with `run`
    "clip_norm", "ema", "max_steps", "lanes", "global_batch_size", "precision", "exact", "check_replicas_every",
    "checkpoint", "time_limit", "nan", "nan_limit", "augment", "curriculum", "difficulty_fn", "callbacks",
    "data_on_device", "early_stop",
)  # fmt: skip
EVALUATION_KEYS = ("loss_fn", "metrics")  # are used by `evaluate` after a train_fn with `run`
# Keys that do not affect the results of a run, only how and where it is executed.
EXECUTION_KEYS = {
    "name", "run_dir", "launcher", "procs", "nodes", "rendezvous", "max_restarts", "hang_timeout_s", "device",
    "backend", "log", "checkpoint", "resume", "time_limit", "workers", "nan_limit", "check_replicas_every", "ddp",
    "bucket_mb", "static_graph", "lanes", "global_batch_size", "threads", "data_on_device", "shard_optimizer", "folder",
    "predict_fn",
}  # fmt: skip
DEFAULT_LRS = {"muon": 0.02}  # of optimizers whose usual learning rate is not near 1e-3
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d)")


def _listed(value: Any) -> Any:
    """A single name, as a list with this name."""
    return [value] if isinstance(value, str) else value


def _named_metrics(value: Any) -> Any:
    """Metrics as a list of names or a dict of functions; a ValueError says what else they are."""
    if isinstance(value, dict):
        for name, metric in value.items():
            if not isinstance(name, str):
                raise ValueError(f"has the name {name!r}, which is not a text; give {{name: function(output, target)}}")
            if isinstance(metric, type):
                raise ValueError(f"has the class {metric.__name__} as {name}; give an object of it, or a function")
            if not (callable(metric) or isinstance(metric, str) or hasattr(metric, "compute")):
                raise ValueError(f"has {name}={metric!r}, which is not a function; give a function(output, target)")
        return value
    names = _listed(value)
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError("is not a list of names; for functions of your own, give {name: function(output, target)}")
    return list(names)


def _named(value: Any) -> Any:
    """A single name, as a section with this name and defaults for the rest."""
    return {"name": value} if isinstance(value, str) else value


def _false_as(word: str) -> BeforeValidator:
    """Replaces False by a word: YAML reads `off` and `no` as False."""
    return BeforeValidator(lambda value: word if value is False else value)


def _best(value: Any) -> Any:
    """Refuses a metric without a mode, unless it is a loss."""
    metric = value.get("metric") if isinstance(value, dict) and value.get("mode") is None else None
    if isinstance(value, str) or (isinstance(metric, str) and not metric.endswith("loss")):
        forms = " or ".join(f"{{metric: {metric or value}, mode: {mode}}}" for mode in ("max", "min"))
        raise ValueError(f"needs a mode: whether higher or lower is better; give {forms}")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false where a number is expected: pydantic would read them as 1 and 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and {int, float} & set(kinds) and not {bool, str} & set(kinds):
            raise ValueError("is not a number; give one")
        return value


class Optimizer(_Section):
    """An optimizer of torch.optim by name; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")

    name: str = "adamw"
    lr: float = Field(1e-3, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _default_lr(cls, values: Any) -> Any:
        lr = DEFAULT_LRS.get(str(values.get("name")).lower()) if isinstance(values, dict) else None
        return values if lr is None else {"lr": lr, **values}


# The options of each schedule besides `name`, and their defaults; None: must be given.
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


class Schedule(_Section):
    """The learning rate over the run, as a fraction of the optimizer's; None is the default of SCHEDULES."""

    name: Literal["constant", "linear", "cosine", "exponential", "onecycle", "wsd", "step", "plateau"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    warmup_fraction: float | None = Field(None, gt=0, lt=1)
    decay_fraction: float | None = Field(None, gt=0, le=1)
    start: float | None = Field(None, gt=0, le=1)
    final: float = Field(0.0, ge=0, le=1)
    every_epochs: int | None = Field(None, ge=1)
    every_steps: int | None = Field(None, ge=1)
    factor: float | None = Field(None, gt=0, lt=1)
    metric: str | None = None
    mode: Mode | None = None
    patience: int | None = Field(None, ge=1)
    min_delta: float | None = Field(None, ge=0)

    def option(self, key: str) -> Any:
        """The value of an option of this schedule, or its default."""
        value = getattr(self, key)
        return SCHEDULES[self.name][key] if value is None else value


class Normalize(_Section):
    """Mean and standard deviation of pixels between 0 and 1: one number each, or one for each channel."""

    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]

    @model_validator(mode="after")
    def _check_lengths(self) -> Normalize:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("must have as many numbers in mean as in std, at least one; give one number per channel")
        return self


class Augmentation(_Section):
    """Transforms of image batches on the device, before a step."""

    normalize: Normalize | None = None
    flip: Annotated[Literal["random", "alternating", "none"], _false_as("none")] = "none"
    translate: int = Field(0, ge=0)
    cutout: int = Field(0, ge=0)


class Pacing(_Section):
    """A curriculum: the fraction of the samples, easiest first, that each epoch uses."""

    column: str | None = None
    by: Literal["loss"] | None = None
    start: float = Field(0.2, gt=0, le=1)
    epochs: int = Field(5, ge=1)
    name: Literal["linear", "root", "step"] = "linear"


class EarlyStop(_Section):
    """The metric whose lack of improvement ends the run, and the number of evaluations to wait for it."""

    metric: str = "val_loss"
    mode: Mode | None = None  # None: lower is better, which only losses may leave out
    patience: int = Field(5, ge=1)
    min_delta: float = Field(0.0, ge=0)


class Evaluate(_Section):
    """When the validation data is evaluated, and the batch size."""

    every_steps: int | None = Field(None, ge=1)  # within an epoch
    every_epochs: int | None = Field(None, ge=1)  # None: every epoch
    batch_size: int | None = Field(None, ge=1)  # None: that of training


class Log(_Section):
    """How often metrics are logged, and where to."""

    every_steps: int | None = Field(None, ge=1)  # None: every step at first, then less often
    tensorboard: bool = True
    trackers: Annotated[list[str], BeforeValidator(_listed)] = []  # names of sinks; the trainer checks that they exist
    digests: bool = False


class Best(_Section):
    """The metric that decides which checkpoint is kept besides the newest ones."""

    metric: str = "val_loss"
    mode: Mode = "min"


class Checkpoint(_Section):
    """When checkpoints are saved, and how many are kept."""

    every_steps: int | None = Field(None, ge=1)
    every_minutes: float | None = Field(10, gt=0)
    keep: int = Field(3, ge=1)
    best: Annotated[Best | None, BeforeValidator(_best)] = None
    is_async: bool = Field(True, alias="async")


def _seconds(value: Any) -> Any:
    """The seconds of a duration such as 90, "1h30m" or "1:30:00"."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = CLOCK.fullmatch(text) or DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError("must be a number of seconds, or a duration such as 1h30m or 1:30:00")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _range(what: str) -> Callable[[Any], Any]:
    """A validator of a positive number, or of a range "least:most"; `what` is counted, for the message."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"must be a number of {what}, or least:most such as 1:4")
        return match[0] if match[2] else int(match[1])

    return check


def _rendezvous(value: Any) -> Any:
    """Refuses what is not HOST:PORT."""
    match = re.fullmatch(r"[^:\s]+:(\d{1,5})", str(value).strip())
    if value is not None and (match is None or not 1 <= int(match[1]) <= 65_535):
        raise ValueError("must be a host and a port, such as n1:29400")
    return value


def _packed(value: Any) -> Any:
    """A list of numbers as an array: config.yaml would list them all."""
    if not isinstance(value, (list, tuple)):
        return value
    try:
        return array("d", value)
    except TypeError:
        raise ValueError("must be numbers, one for each sample") from None


def _local(value: Any) -> Any:
    """Refuses what cannot be a path on this machine, such as a URL."""
    if isinstance(value, (str, Path)) and (problem := problem_with(value)):
        raise ValueError(problem)
    return value


def _path_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _ends(value: int | str | None) -> tuple[int, int] | None:
    """The lowest and highest number of a range."""
    if value is None:
        return None
    least, _, most = str(value).partition(":")
    return int(least), int(most or least)


class Config(_Section):
    """The settings of one run, under the same names in Python, in `config.yaml` and on the command line."""

    name: str = Field("run", pattern=r"^[\w.-]+$")
    seed: int = 0
    run_dir: Annotated[Path | None, BeforeValidator(_local)] = None
    folder: Annotated[Path | None, BeforeValidator(_local)] = None

    model_fn: Function | None = None
    model_args: dict[str, Any] = {}
    dataset_fn: Function | None = None
    dataset_args: dict[str, Any] = {}
    df: Any = None
    val_df: Any = None
    val_dataset_fn: Function | None = None
    val_fraction: float = Field(0.1, ge=0, lt=1)
    collate_fn: Function | None = None
    sample_weights: Annotated[Any, BeforeValidator(_packed)] = None
    order_fn: Function | None = None

    train_fn: Function | None = None

    loss_fn: Function | None = None
    step_fn: Annotated[Function | dict[str, Function] | None, BeforeValidator(with_every)] = None
    evaluate_fn: Function | None = None
    predict_fn: Function | None = None
    metrics: Annotated[list[str] | dict[str, Any], BeforeValidator(_named_metrics)] = []
    optimizer: Annotated[Optimizer, BeforeValidator(_named)] = Optimizer()
    optimizer_fn: Function | None = None
    schedule: Annotated[Schedule, BeforeValidator(_named)] = Schedule()
    schedule_fn: Function | None = None
    scheduler_fn: Function | None = None
    early_stop: EarlyStop | None = None
    evaluate: Evaluate = Evaluate()
    clip_norm: float | None = Field(None, gt=0)
    ema: float | None = Field(None, gt=0, lt=1)
    augment: Augmentation | None = None
    curriculum: Pacing | None = None
    difficulty_fn: Function | None = None
    callbacks: Annotated[list[Any], BeforeValidator(_listed)] = []

    batch_size: int = Field(32, ge=1)
    lanes: int | None = Field(None, ge=1)
    global_batch_size: int | None = Field(None, ge=1)
    num_epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)
    workers: int = Field(0, ge=0)

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: bool = True
    channels_last: bool | Literal["auto"] = "auto"
    step_mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    data_on_device: float = Field(0.5, ge=0, le=1)
    exact: bool = True
    check_replicas_every: int = Field(100, ge=1)
    ddp: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float = Field(25, gt=0)
    compression: Annotated[Literal["none", "bf16", "fp16", "powersgd"], _false_as("none")] = "none"
    sync_batchnorm: bool = False
    shard_optimizer: bool = False

    checkpoint: Checkpoint = Checkpoint()
    resume: Annotated[str, BeforeValidator(_path_as_text), BeforeValidator(_local)] = "never"
    time_limit: Annotated[float | None, BeforeValidator(_seconds)] = Field(None, gt=0)
    nan: Annotated[Literal["skip", "stop", "off"], _false_as("off")] = "skip"
    nan_limit: int = Field(20, ge=1)

    launcher: str = "auto"
    procs: Annotated[int | str | None, BeforeValidator(_range("processes"))] = None
    nodes: Annotated[int | str | None, BeforeValidator(_range("hosts"))] = None
    rendezvous: Annotated[str | None, BeforeValidator(_rendezvous)] = None
    max_restarts: int | None = Field(None, ge=0)
    hang_timeout_s: float = Field(600, ge=0)
    threads: int | None = Field(None, ge=1)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    log: Log = Log()

    _names: dict[str, str] = PrivateAttr(default_factory=dict)  # of the objects that the user gave by name
    _origin: Origin = PrivateAttr(default_factory=Origin)  # for the words in messages about the config

    @property
    def origin(self) -> Origin:
        """Where the user typed the keys, in a config from `build`."""
        return self._origin

    def function(self, key: str) -> Callable[..., Any]:
        """The function under `key`, in a config from `build`."""
        value = getattr(self, key)
        assert callable(value), key
        return value  # type: ignore[no-any-return]

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """The `collate_fn`, in a config from `build`."""
        return None if self.collate_fn is None else self.function("collate_fn")

    @property
    def takes_run(self) -> bool:
        """Whether `train_fn` has a parameter `run`, through which it is saved and resumed."""
        try:
            return callable(self.train_fn) and "run" in inspect.signature(self.train_fn).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return False

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints hold the whole state of the run: in the managed loop, and in a `train_fn` with `run`."""
        return self.train_fn is None or self.takes_run

    @property
    def procs_range(self) -> tuple[int, int] | None:
        """The lowest and highest number of processes; None if the config leaves it open."""
        return _ends(self.procs)

    @property
    def nodes_range(self) -> tuple[int, int] | None:
        """The lowest and highest number of hosts; None if the config leaves it open."""
        return _ends(self.nodes)

    def to_yaml(self) -> str:
        """The config as YAML: functions by name, tables in memory by their type."""
        plain = {key: to_plain(value) for key, value in self.__dict__.items() if value is not None}
        objects = {key: name for key, name in self._names.items() if is_object(self.__dict__[key])}
        return dump_yaml({**plain, **objects})
