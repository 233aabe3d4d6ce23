"""The typed config: what a run is, from YAML, the command line or Python, with every mistake reported at once.

Nothing here knows about devices, processes or the environment.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from paceline.errors import ConfigError
from paceline.functions import FunctionNotFound, home_of, name_of, resolve

Function = Callable[..., Any] | str
FUNCTION_KEYS = ("model_fn", "dataset_fn", "val_dataset_fn", "train_fn", "loss_fn", "optimizer_fn", "difficulty_fn")
TABLE_KEYS = ("df", "val_df")
TRAIN_FN_ARGUMENTS = ("model", "train_loader", "val_loader", "device", "num_epochs")
MANAGED_KEYS = (
    "metrics", "optimizer", "optimizer_fn", "schedule", "clip_norm", "ema", "max_steps", "lanes", "precision", "exact",
    "check_replicas_every", "checkpoint", "resume", "time_limit", "nan", "nan_limit", "augment",
    "curriculum", "difficulty_fn", "step_mode", "data_on_device", "compression", "shard_optimizer",
)  # fmt: skip
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d)")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Optimizer(BaseModel):
    """An optimizer of torch.optim by name; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")

    name: str = "adamw"
    lr: float = Field(1e-3, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _know_muon(cls, values: Any) -> Any:
        is_muon = isinstance(values, dict) and str(values.get("name")).lower() == "muon"
        return {"lr": 0.02, **values} if is_muon else values


class Schedule(_Section):
    """How the learning rate moves: a warm-up from zero, then `name` down to `final` × lr."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    final: float = Field(0.0, ge=0, le=1)


class Normalize(_Section):
    """What pixels between 0 and 1 are shifted and divided by: one number, or one for each channel."""

    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]

    @model_validator(mode="after")
    def _has_pairs(self) -> Normalize:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("must have as many numbers in mean as in std, and at least one; give one for each channel")
        return self


class Augmentation(_Section):
    """What is done to batches of images on the device before a step."""

    normalize: Normalize | None = None
    flip: Annotated[
        Literal["random", "alternating", "none"], BeforeValidator(lambda v: "none" if v is False else v)
    ] = "none"
    translate: int = Field(0, ge=0)
    cutout: int = Field(0, ge=0)


class Pacing(_Section):
    """Which share of the samples, the easiest first, an epoch may use."""

    column: str | None = None
    by: Literal["loss"] | None = None
    start: float = Field(0.2, gt=0, le=1)
    epochs: int = Field(5, ge=1)
    name: Literal["linear", "root", "step"] = "linear"


class Log(_Section):
    """How often a run says how it is doing."""

    every_steps: int = Field(10, ge=1)
    tensorboard: bool = True
    trackers: Annotated[
        list[Literal["wandb", "mlflow"]], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = []
    digests: bool = False


class Best(_Section):
    """Which checkpoint is worth keeping besides the newest ones."""

    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"


class Checkpoint(_Section):
    """When the state of a run is saved, and what is kept."""

    every_steps: int | None = Field(None, ge=1)
    every_minutes: float | None = Field(10, gt=0)
    keep: int = Field(3, ge=1)
    best: Best | None = None
    is_async: bool = Field(True, alias="async")


def _seconds(value: Any) -> Any:
    """A duration such as 90, "1h30m" or "1:30:00", in seconds."""
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
    """Checks for a number of something, or "least:most"."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"must be a number of {what}, or least:most such as 1:4")
        return match[0] if match[2] else int(match[1])

    return check


def _rendezvous(value: Any) -> Any:
    """A host and a port."""
    match = re.fullmatch(r"[^:\s]+:(\d{1,5})", str(value).strip())
    if value is not None and (match is None or not 1 <= int(match[1]) <= 65_535):
        raise ValueError("must be a host and a port, such as n1:29400")
    return value


def _ends(value: int | str | None) -> tuple[int, int] | None:
    """The least and the most of such a range."""
    if value is None:
        return None
    least, _, most = str(value).partition(":")
    return int(least), int(most or least)


class Config(_Section):
    """One run. The same names in Python, in `config.yaml` and on the command line."""

    name: str = Field("run", pattern=r"^[\w.-]+$")
    seed: int = 0
    run_dir: Path | None = None
    folder: Path | None = None

    model_fn: Function | None = None
    model_args: dict[str, Any] = {}
    dataset_fn: Function | None = None
    dataset_args: dict[str, Any] = {}
    df: Any = None
    val_df: Any = None
    val_dataset_fn: Function | None = None
    val_fraction: float = Field(0.1, ge=0, lt=1)

    train_fn: Function | None = None

    loss_fn: Function | None = None
    metrics: list[str] | dict[str, Function] = []
    optimizer: Annotated[Optimizer, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)] = Optimizer()
    optimizer_fn: Function | None = None
    schedule: Schedule = Schedule()
    clip_norm: float | None = Field(None, gt=0)
    ema: float | None = Field(None, gt=0, lt=1)
    augment: Augmentation | None = None
    curriculum: Pacing | None = None
    difficulty_fn: Function | None = None

    batch_size: int = Field(32, ge=1)
    lanes: int | None = Field(None, ge=1)
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
    compression: Annotated[
        Literal["none", "bf16", "fp16", "powersgd"], BeforeValidator(lambda v: "none" if v is False else v)
    ] = "none"
    sync_batchnorm: bool = False
    shard_optimizer: bool = False

    checkpoint: Checkpoint = Checkpoint()
    resume: Annotated[str, BeforeValidator(lambda v: str(v) if isinstance(v, Path) else v)] = "never"
    time_limit: Annotated[float | None, BeforeValidator(_seconds)] = Field(None, gt=0)
    nan: Annotated[Literal["skip", "stop", "off"], BeforeValidator(lambda v: "off" if v is False else v)] = "skip"
    nan_limit: int = Field(20, ge=1)

    launcher: Literal["auto", "local", "torchrun", "slurm", "ray"] = "auto"
    procs: Annotated[int | str | None, BeforeValidator(_range("processes"))] = None
    nodes: Annotated[int | str | None, BeforeValidator(_range("hosts"))] = None
    rendezvous: Annotated[str | None, BeforeValidator(_rendezvous)] = None
    max_restarts: int | None = Field(None, ge=0)
    hang_timeout_s: float = Field(600, ge=0)
    threads: int | None = Field(None, ge=1)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    log: Log = Log()

    def function(self, key: str) -> Callable[..., Any]:
        """The function under `key`; `build` has made sure that it is one."""
        value = getattr(self, key)
        assert callable(value), key
        return value  # type: ignore[no-any-return]

    @property
    def procs_range(self) -> tuple[int, int] | None:
        """The least and the most processes that the config asks for, if it does."""
        return _ends(self.procs)

    @property
    def nodes_range(self) -> tuple[int, int] | None:
        """The least and the most hosts that the config asks for, if it does."""
        return _ends(self.nodes)

    def to_yaml(self) -> str:
        """The config as resolved, for people to read; data given in memory is named by its type."""
        plain = {key: to_plain(value) for key, value in self.__dict__.items() if value is not None}
        return dump_yaml(plain)


def build(raw: Mapping[str, Any], *, folder: Path | None = None) -> Config:
    """A checked config with callable functions, or one ConfigError that lists every mistake.

    Names of functions and relative paths of data are looked up in the config's `folder`, which is relative to this one.
    """
    # A known key without a value keeps its default; an unknown one is a mistake all the same.
    values = {str(k): value for k, value in raw.items() if value is not None or k not in Config.model_fields}
    problems: list[str] = []
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += list(dict.fromkeys(describe(detail) for detail in details))
        # What is right is checked further, so that nobody mends one mistake only to be shown the next.
        wrong = {str(detail["loc"][0]) for detail in details}
        config = Config.model_validate({key: value for key, value in values.items() if key not in wrong})
        problems += _conflicts(config, given=set(values), wrong=wrong)
    else:
        problems += _conflicts(config, given=set(values))
    if config.folder is not None:
        folder = (folder or Path()) / config.folder
    problems += _resolve_functions(config, folder)
    problems += unknown_names(config)
    problems += resolve_tables(config, folder)
    if problems:
        raise ConfigError(problems)
    config.folder = folder.resolve() if folder is not None else _home(config)
    return config


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with `1e-4` a number and no key given twice."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not a {type(loaded).__name__}")
    return loaded


def dump_yaml(plain: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads back as it was."""
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def override(raw: dict[str, Any], assignments: Iterable[str]) -> None:
    """Apply `key=value` and `key.inner=value` from the command line; values are read as YAML.

    A table is looked for in the working folder first, where people see it when they type, then in the config's.
    """
    problems = []
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        *sections, last = dotted.split(".")
        if not separator or not all([*sections, last]):
            problems.append(f"{assignment!r} is not key=value; write for instance batch_size=128 or optimizer.lr=3e-4")
            continue
        target = raw
        for section in sections:
            inner = target.get(section)
            target[section] = target = dict(inner) if isinstance(inner, dict) else {}
        try:
            target[last] = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            target[last] = text
        if dotted in TABLE_KEYS and Path(text).is_file():
            target[last] = str(Path(text).resolve())
    if problems:
        raise ConfigError(problems)


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `1e-4` is a number, `1:4` is none, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]  # type: ignore[no-untyped-call]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"{twice} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


# YAML 1.1 reads 1:4 as 64, in base 60.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, re.compile(r"(?!.*\d:)" + pattern.pattern, pattern.flags)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(  # type: ignore[no-untyped-call]
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def describe(detail: ErrorDetails) -> str:
    """One sentence of the form `<key>=<value> <what is wrong>; <what to do>`."""
    # Unions put the branch that failed into the location; people know the key alone.
    path = [str(part) for part in detail["loc"] if isinstance(part, str) and not re.search(r"[\[(-]", part)]
    path = [p for p in path if p not in ("str", "callable", "bool")]
    if detail["type"] == "extra_forbidden":
        path = [str(part) for part in detail["loc"]]  # an unknown key may have any characters
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"known keys: {', '.join(known)}"
        return f"{key} is not a known key; {hint}"
    if path[-1] in FUNCTION_KEYS:
        return f'{key}={_short(detail["input"])} is not a function; give a function, or "module:name" in a config'
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}={_short(detail['input'])} {message[0].lower()}{message[1:]}"


def _known_keys(sections: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for section in sections:
        annotation = model.model_fields[section].annotation
        annotation = next((part for part in get_args(annotation) if part is not type(None)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _conflicts(config: Config, *, given: set[str], wrong: Collection[str] = ()) -> list[str]:
    """Mistakes that show only when keys are seen together.

    `given` are the keys that were set by the user; those in `wrong` are reported already.
    """
    problems = []
    for key, example in (
        ("model_fn", "a function that returns the model"),
        ("dataset_fn", "the data set's class"),
    ):
        if getattr(config, key) is None and key not in wrong:
            problems.append(f"{key} is missing; give {example}")
    if config.train_fn is None and config.loss_fn is None and not {"train_fn", "loss_fn"} & set(wrong):
        problems.append(
            "train_fn and loss_fn are both missing; give train_fn (your own loop) or loss_fn (the managed loop)"
        )
    if config.train_fn is not None:
        idle = [key for key in ("loss_fn", *MANAGED_KEYS) if key in given]
        if idle:
            belong = "belongs" if len(idle) == 1 else "belong"
            problems.append(
                f"{', '.join(idle)} {belong} to the managed loop; remove train_fn, or do it inside train_fn"
            )
        if config.log.trackers:
            problems.append("log.trackers has nothing to tell of your own loop; remove it, and log inside train_fn")
    if config.optimizer_fn is not None and "optimizer" in given:
        problems.append("optimizer and optimizer_fn are both given; keep one of them")
    problems += _curriculum(config)
    for key in ("val_df", "val_dataset_fn"):
        if key in given and "val_fraction" in given:
            problems.append(f"{key} and val_fraction are both given; keep one of them")
    best = config.checkpoint.best
    measured = ["val_loss", "train_loss", *config.metrics]
    if best is not None and best.metric not in measured and "metrics" not in wrong:
        problems.append(f"checkpoint.best.metric={best.metric!r} is not measured; use {', '.join(measured)}")
    if (config.nodes is None) != (config.rendezvous is None) and not {"nodes", "rendezvous"}.intersection(wrong):
        problems.append("nodes and rendezvous belong together, as in --nodes 2 --rendezvous HOST:29400; give both")
    if config.launcher == "ray" and config.nodes is not None:
        problems.append(f"nodes={config.nodes} is up to Ray with launcher=ray; remove it, procs counts all processes")
    if not config.ddp and config.nodes is not None:
        problems.append(f"nodes={config.nodes} needs DDP; remove ddp: false")
    if not config.ddp and (config.procs_range or (1, 1))[0] > 1:
        problems.append(f"procs={config.procs} needs DDP; remove ddp: false, or use --procs 1")
    problems += _inexact(config)
    if config.device == "cpu" and config.step_mode == "graph":
        problems.append("step_mode=graph needs a GPU, but device=cpu; use step_mode: auto")
    if config.device == "cpu" and config.backend == "nccl":
        problems.append("backend=nccl cannot work with device=cpu; use backend: gloo")
    return problems


def _curriculum(config: Config) -> list[str]:
    """Difficulty comes from one place, and only for a curriculum."""
    if config.curriculum is None:
        return ["difficulty_fn belongs to a curriculum; add curriculum: {epochs: …}"] if config.difficulty_fn else []
    given = (config.difficulty_fn, config.curriculum.column, config.curriculum.by)
    if sum(source is not None for source in given) != 1:
        return ["curriculum needs the difficulty of the samples; give difficulty_fn, curriculum.column or by: loss"]
    if config.curriculum.by == "loss" and config.num_epochs == 1:
        return ["curriculum.by=loss ranks the samples after the first epoch, but num_epochs=1; use 2 or more"]
    return []


def _inexact(config: Config) -> list[str]:
    """Keys whose numbers depend on the number of ranks, and what they cannot be used with."""
    problems = []
    if config.compression != "none" and config.exact and config.train_fn is None:
        problems.append(f"compression={config.compression} rounds the sums by the number of ranks; set exact: false")
    if config.compression == "powersgd" and config.find_unused_parameters:
        problems.append("compression=powersgd cannot be used with find_unused_parameters=true; use bf16 or fp16")
    if config.sync_batchnorm and config.exact and config.train_fn is None:
        problems.append("sync_batchnorm=true takes its statistics over all ranks; set exact: false")
    if config.sync_batchnorm and config.device == "cpu":
        problems.append("sync_batchnorm=true cannot work with device=cpu, torch has it for GPUs; remove one of them")
    return problems


def _resolve_functions(config: Config, folder: Path | None) -> list[str]:
    problems = []

    def resolved(key: str, name: str) -> Callable[..., Any] | str:
        # A bare name is a loss of torch.nn.functional: `loss_fn: cross_entropy`.
        full = f"torch.nn.functional:{name}" if key == "loss_fn" and ":" not in name else name
        try:
            return resolve(full, folder)
        except FunctionNotFound as reason:
            problems.append(f"{key}={name!r} {reason}")
            return name

    for key in FUNCTION_KEYS:
        value = getattr(config, key)
        if isinstance(value, str):
            setattr(config, key, resolved(key, value))
    if isinstance(config.metrics, dict):
        config.metrics = {
            name: resolved(f"metrics.{name}", metric) if isinstance(metric, str) else metric
            for name, metric in config.metrics.items()
        }
    if callable(config.train_fn):
        try:
            inspect.signature(config.train_fn).bind(*TRAIN_FN_ARGUMENTS)
        except TypeError:
            problems.append(
                f"train_fn={name_of(config.train_fn)} takes {inspect.signature(config.train_fn)}; "
                f"it is called as train_fn({', '.join(TRAIN_FN_ARGUMENTS)})"
            )
        except ValueError:
            pass  # a builtin without a signature
    return problems


def _home(config: Config) -> Path | None:
    """The folder of the first function that is not of an installed package: there, a command finds them again."""
    functions = (getattr(config, key) for key in FUNCTION_KEYS)
    return next((home for function in functions if function is not None and (home := home_of(function))), None)


def unknown_names(config: Config) -> list[str]:
    """Optimizers and metrics that do not exist. torch knows the optimizers, so this is where it is first needed."""
    from paceline.metrics import NAMED
    from paceline.optim import problems_with

    problems = problems_with(config.optimizer.name, config.optimizer.model_extra or {})
    if isinstance(config.metrics, list):
        for name in config.metrics:
            if name not in NAMED:
                problems.append(f"metrics={name!r} is not known; use {', '.join(NAMED)}, or {{{name}: function}}")
    return problems


def resolve_tables(config: Config, folder: Path | None) -> list[str]:
    """Make the paths of tables absolute; what is wrong with them, one sentence each."""
    problems = []
    for key in TABLE_KEYS:
        table = getattr(config, key)
        if table is None or hasattr(table, "columns"):
            continue
        if not isinstance(table, (str, Path)):
            problems.append(f"{key} is a {type(table).__name__}; give a DataFrame or the path of a CSV or Parquet file")
            continue
        path = (folder or Path()) / table
        if path.suffix.lower() not in (".csv", ".parquet", ".gz"):
            problems.append(f"{key}={str(table)!r} must end in .csv, .csv.gz or .parquet")
        elif not path.is_file():
            problems.append(f"{key}={str(table)!r} does not exist; looked for {path.resolve()}")
        setattr(config, key, path.resolve())
    return problems


def to_plain(value: Any) -> Any:
    """A value of a config as YAML and JSON can write it: functions by name, data by its type."""
    if isinstance(value, BaseModel):
        defaults = type(value)().model_dump(by_alias=True)
        return {  # a None that is not the default says something, as in `every_minutes: null`
            key: to_plain(inner)
            for key, inner in value.model_dump(by_alias=True).items()
            if inner is not None or defaults.get(key) is not None
        }
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    # Subclasses, such as numpy's numbers, are more than YAML can write.
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    return name_of(value) if callable(value) else f"<{type(value).__name__}>"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
