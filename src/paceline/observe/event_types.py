"""The fields that a line of `events.jsonl` may have, by kind of event; docs/events.md explains each field.

All readers use `parse`, or a `Parser` if they need the epoch: each field of a parsed event has its type, and a damaged
line gives no event. `complete` adds missing fields, for readers that show all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

Event = dict[str, Any]

Count = Annotated[int, Field(ge=0, le=2**53)]  # the integers that JavaScript represents exactly
UnixTime = Annotated[float, Field(ge=0, le=1e11)]  # seconds since 1970
Measured = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
PerRank = list[Measured]

STRICT = ConfigDict(strict=True, extra="ignore")


class MachineFields(TypedDict):
    """The machine of rank 0."""

    host: str
    system: str
    cores: Count | None
    gpu: str | None


@with_config(STRICT)
class RunStartedEvent(TypedDict):
    """The ranks have started."""

    event: Literal["run_started"]
    time: UnixTime
    version: NotRequired[Count]
    name: NotRequired[str]
    run_dir: NotRequired[str]
    seed: NotRequired[int]
    world_size: NotRequired[Count]
    lanes: NotRequired[Count]
    device: NotRequired[str]
    backend: NotRequired[str]
    machine: NotRequired[MachineFields]
    versions: NotRequired[dict[str, str]]
    commit: NotRequired[str | None]


@with_config(STRICT)
class ResumedEvent(TypedDict):
    """The run continues from a checkpoint."""

    event: Literal["resumed"]
    time: UnixTime
    step: Count
    checkpoint: NotRequired[str]
    changes: NotRequired[list[str]]


@with_config(STRICT)
class TextEvent(TypedDict):
    """An event that is described by a text."""

    event: Literal["restarted", "warning", "step_mode", "run_failed"]
    time: UnixTime
    text: str
    step: NotRequired[Count]


@with_config(STRICT)
class StragglerEvent(TypedDict):
    """One rank delays the others."""

    event: Literal["straggler"]
    time: UnixTime
    text: str
    step: NotRequired[Count]
    rank: NotRequired[Count]
    host: NotRequired[str]
    phase: NotRequired[str]
    behind_ms: NotRequired[Measured]
    share: NotRequired[Measured]


@with_config(STRICT)
class StepEvent(TypedDict):
    """A recorded step, or the speed of training; in version 1 of the events, `step` was both."""

    event: Literal["step", "pace"]
    time: UnixTime
    step: Count
    steps: NotRequired[Count | None]
    epoch: NotRequired[Count]
    epochs: NotRequired[Annotated[Count, Field(ge=1)]]
    loss: NotRequired[float | None]
    lr: NotRequired[float]
    samples_per_s: NotRequired[Measured]
    grad_norm: NotRequired[float | None]
    values: NotRequired[dict[str, float | None]]
    step_ms: NotRequired[PerRank]
    phase_ms: NotRequired[dict[str, PerRank]]
    memory_mb: NotRequired[PerRank]


@with_config(ConfigDict(strict=True, extra="allow"))
class EpochEvent(TypedDict):
    """An epoch has ended, or an evaluation within it; each metric has its own field."""

    event: Literal["epoch", "evaluation"]
    time: UnixTime
    epoch: Count
    step: Count
    train_loss: NotRequired[float | None]


@with_config(STRICT)
class LoggedEvent(TypedDict):
    """Numbers that callbacks have logged."""

    event: Literal["logged"]
    time: UnixTime
    step: Count
    values: dict[str, float | None]


@with_config(STRICT)
class ImageEvent(TypedDict):
    """An image that was logged, as a file in the run folder."""

    event: Literal["image"]
    time: UnixTime
    step: Count
    name: str
    file: str


@with_config(STRICT)
class HistogramEvent(TypedDict):
    """The distribution of the numbers in a tensor that was logged."""

    event: Literal["histogram"]
    time: UnixTime
    step: Count
    name: str
    edges: list[float]
    counts: list[int]
    sum: float
    sum_squares: float


@with_config(STRICT)
class EvaluatingEvent(TypedDict):
    """The progress of an evaluation."""

    event: Literal["evaluating"]
    time: UnixTime
    batch: NotRequired[Count]
    batches: NotRequired[Count | None]


@with_config(STRICT)
class ProgressEvent(TypedDict):
    """The progress of a pass of the user's own loop."""

    event: Literal["progress"]
    time: UnixTime
    phase: NotRequired[str]
    epoch: NotRequired[Count]
    batch: NotRequired[Count]
    batches: NotRequired[Count | None]


@with_config(STRICT)
class SavingEvent(TypedDict):
    """The state has been copied and is being written."""

    event: Literal["saving"]
    time: UnixTime
    step: Count
    held_s: NotRequired[Measured]


@with_config(STRICT)
class CheckpointEvent(TypedDict):
    """A checkpoint is published."""

    event: Literal["checkpoint"]
    time: UnixTime
    step: Count
    bytes: NotRequired[Count]
    seconds: NotRequired[Measured]
    cost_s: NotRequired[Measured]


@with_config(STRICT)
class SaveIntervalEvent(TypedDict):
    """`checkpoint.every_minutes: auto` has chosen the time between two checkpoints."""

    event: Literal["save_interval"]
    time: UnixTime
    text: str
    step: NotRequired[Count]
    interval_s: NotRequired[Measured]
    cost_s: NotRequired[Measured]


@with_config(STRICT)
class MirrorEvent(TypedDict):
    """The state of the mirror has changed: its place is known, or it has caught up."""

    event: Literal["mirror"]
    time: UnixTime
    place: str
    text: str


@with_config(STRICT)
class MirroredEvent(TypedDict):
    """A checkpoint is complete in the mirror."""

    event: Literal["mirrored"]
    time: UnixTime
    step: Count
    place: NotRequired[str]
    bytes: NotRequired[Count]
    seconds: NotRequired[Measured]


@with_config(STRICT)
class DigestsEvent(TypedDict):
    """A digest of each parameter."""

    event: Literal["digests"]
    time: UnixTime
    step: Count
    digests: list[int]


@with_config(STRICT)
class RunStoppedEvent(TypedDict):
    """The run has stopped on request."""

    event: Literal["run_stopped"]
    time: UnixTime
    step: Count
    reason: NotRequired[str]
    is_saved: NotRequired[bool]


@with_config(STRICT)
class RunFinishedEvent(TypedDict):
    """The run has finished."""

    event: Literal["run_finished"]
    time: UnixTime
    step: NotRequired[Count | None]
    epoch: NotRequired[Count | None]
    metrics: NotRequired[dict[str, float]]
    config: NotRequired[dict[str, Any]]
    reason: NotRequired[str]


@with_config(ConfigDict(strict=True, extra="allow"))
class UnknownEvent(TypedDict):
    """An event of a later version."""

    event: str
    time: UnixTime


def _ranks_agree(event: StepEvent) -> StepEvent:
    """Check that the times of a step have one number per rank."""
    ranks = len(event.get("step_ms", ()))
    if any(len(ms) != ranks for ms in event.get("phase_ms", {}).values()):
        raise ValueError("phase_ms and step_ms have different numbers of ranks")
    return event


def _only_numbers(event: Event) -> Event:
    """The fields of the epoch that are numbers."""
    return {
        name: value
        for name, value in event.items()
        if name == "event" or value is None or type(value) is float or (type(value) is int and abs(value) <= 2**53)
    }


KnownEvent = Annotated[
    RunStartedEvent
    | ResumedEvent
    | TextEvent
    | StragglerEvent
    | Annotated[StepEvent, AfterValidator(_ranks_agree)]
    | Annotated[EpochEvent, AfterValidator(_only_numbers)]
    | LoggedEvent
    | ImageEvent
    | HistogramEvent
    | EvaluatingEvent
    | ProgressEvent
    | SavingEvent
    | CheckpointEvent
    | MirrorEvent
    | MirroredEvent
    | SaveIntervalEvent
    | DigestsEvent
    | RunStoppedEvent
    | RunFinishedEvent,
    Field(discriminator="event"),
]

# Names that users' values cannot have, because they are fields of the events in which values are plotted. `loss`
# is allowed. `self` is an argument of the methods that take values as keywords.
RESERVED_NAMES = frozenset({"self"}.union(*(kind.__annotations__ for kind in (StepEvent, EpochEvent, LoggedEvent))))
RESERVED_NAMES -= {"loss"}
TRAIN_PREFIX = "train_"  # of the means over training batches, to distinguish them from the metrics in an `epoch` event


def is_reserved(name: str) -> bool:
    """Whether a metric cannot have this name, because it would overwrite another number of an `epoch` event."""
    return name in RESERVED_NAMES or name.startswith(TRAIN_PREFIX)


# Defaults of missing fields. Metrics and times have none: no number can replace them.
MISSING: dict[str, Event] = {
    "run_started": {
        "name": "run", "run_dir": "?", "seed": 0, "world_size": 1, "lanes": 1, "device": "?", "backend": "?",
    },
    "resumed": {"checkpoint": "?", "changes": []},
    "step": {"steps": None, "epoch": 1, "epochs": 1, "loss": None},
    "pace": {"steps": None, "epoch": 1, "epochs": 1, "samples_per_s": 0.0},
    "evaluating": {"batch": 0, "batches": None},
    "progress": {"phase": "training", "epoch": 1, "batch": 0, "batches": None},
    "saving": {"held_s": 0.0},
    "checkpoint": {"bytes": 0, "seconds": 0.0},
    "run_stopped": {"reason": "?", "is_saved": False},
}  # fmt: skip


def complete(event: Event) -> Event:
    """The event with all fields that readers show; missing fields get a default."""
    return {**MISSING.get(event["event"], {}), **event}


def values_in(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The names and numbers in the field `values` of an event; the event's own fields have precedence."""
    for name, value in event.get("values", {}).items():
        if value is not None and name not in event:
            yield name, value


def parse(line: bytes | str) -> Event | None:
    """The event in a line, without unknown fields; None if the line is empty, incomplete or damaged."""
    try:
        event: Event = _adapter(KnownEvent).validate_json(line)
    except ValidationError as error:
        return _later_event(line) if error.errors()[0]["type"] == "union_tag_invalid" else None
    return event


class Parser:
    """Parses the lines of one file in order; epochs count from 1, also those of version 1, which counts from 0."""

    def __init__(self) -> None:
        self._is_version_1 = False

    def parse(self, line: bytes | str) -> Event | None:
        """The event in the next line, or None, as `parse` returns it."""
        event = parse(line)
        if event is not None and event["event"] == "run_started":
            self._is_version_1 = event.get("version") == 1
        if event is not None and self._is_version_1 and event.get("epoch") is not None:
            event["epoch"] += 1
        return event


def _later_event(line: bytes | str) -> Event | None:
    """The event of an unknown kind in a line, from a later version; None if the line is damaged."""
    try:
        event: Event = _adapter(UnknownEvent).validate_json(line)
    except ValidationError:
        return None
    return event


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The validator of a type, built at its first use: ranks write events and never need one."""
    return TypeAdapter(kind)
