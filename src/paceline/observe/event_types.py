"""What a line of `events.jsonl` may hold, by the kind of event; docs/events.md has the meaning of each field.

Whatever reads events takes them from `parse`, or from a `Parser` where epochs count: a field that is there has its
type, and a damaged line is no event. `complete` adds the fields that are missing, for readers that show all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

Event = dict[str, Any]

Count = Annotated[int, Field(ge=0, le=2**53)]  # JavaScript, too, has these numbers
Moment = Annotated[float, Field(ge=0, le=1e11)]  # seconds since 1970
Measured = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
OfRanks = list[Measured]

STRICT = ConfigDict(strict=True, extra="ignore")


class MachineFields(TypedDict):
    """Where rank 0 runs."""

    host: str
    system: str
    cores: Count | None
    gpu: str | None


@with_config(STRICT)
class RunStarted(TypedDict):
    """The ranks have started."""

    event: Literal["run_started"]
    time: Moment
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
class Resumed(TypedDict):
    """The run continues from a checkpoint."""

    event: Literal["resumed"]
    time: Moment
    step: Count
    checkpoint: NotRequired[str]
    changes: NotRequired[list[str]]


@with_config(STRICT)
class WithText(TypedDict):
    """What is said in words."""

    event: Literal["restarted", "warning", "run_failed"]
    time: Moment
    text: str
    step: NotRequired[Count]


@with_config(STRICT)
class Straggler(TypedDict):
    """One rank holds the others back."""

    event: Literal["straggler"]
    time: Moment
    text: str
    step: NotRequired[Count]
    rank: NotRequired[Count]
    host: NotRequired[str]
    phase: NotRequired[str]
    behind_ms: NotRequired[Measured]
    share: NotRequired[Measured]


@with_config(STRICT)
class Step(TypedDict):
    """A recorded step, or how fast training is; in version 1 of the events, `step` was both."""

    event: Literal["step", "pace"]
    time: Moment
    step: Count
    steps: NotRequired[Count | None]
    epoch: NotRequired[Count]
    epochs: NotRequired[Annotated[Count, Field(ge=1)]]
    loss: NotRequired[float | None]
    lr: NotRequired[float]
    samples_per_s: NotRequired[Measured]
    grad_norm: NotRequired[float | None]
    step_ms: NotRequired[OfRanks]
    phase_ms: NotRequired[dict[str, OfRanks]]
    memory_mb: NotRequired[OfRanks]


@with_config(ConfigDict(strict=True, extra="allow"))
class Epoch(TypedDict):
    """An epoch has ended; each metric has a field of its own."""

    event: Literal["epoch"]
    time: Moment
    epoch: Count
    step: Count
    train_loss: NotRequired[float | None]


@with_config(STRICT)
class Evaluating(TypedDict):
    """How far an evaluation is."""

    event: Literal["evaluating"]
    time: Moment
    batch: NotRequired[Count]
    batches: NotRequired[Count | None]


@with_config(STRICT)
class ProgressEvent(TypedDict):
    """How far a pass of the user's own loop is."""

    event: Literal["progress"]
    time: Moment
    phase: NotRequired[str]
    epoch: NotRequired[Count]
    batch: NotRequired[Count]
    batches: NotRequired[Count | None]


@with_config(STRICT)
class Saving(TypedDict):
    """The state has been copied."""

    event: Literal["saving"]
    time: Moment
    step: Count
    held_s: NotRequired[Measured]


@with_config(STRICT)
class CheckpointSaved(TypedDict):
    """A checkpoint is published."""

    event: Literal["checkpoint"]
    time: Moment
    step: Count
    bytes: NotRequired[Count]
    seconds: NotRequired[Measured]


@with_config(STRICT)
class Digests(TypedDict):
    """A digest of each parameter."""

    event: Literal["digests"]
    time: Moment
    step: Count
    digests: list[int]


@with_config(STRICT)
class RunStopped(TypedDict):
    """The run has stopped on request."""

    event: Literal["run_stopped"]
    time: Moment
    step: Count
    reason: NotRequired[str]
    is_saved: NotRequired[bool]


@with_config(STRICT)
class RunFinished(TypedDict):
    """The run is done."""

    event: Literal["run_finished"]
    time: Moment
    step: NotRequired[Count | None]
    epoch: NotRequired[Count | None]
    metrics: NotRequired[dict[str, float]]
    config: NotRequired[dict[str, Any]]


@with_config(ConfigDict(strict=True, extra="allow"))
class Unknown(TypedDict):
    """An event of a later version."""

    event: str
    time: Moment


def _ranks_agree(event: Step) -> Step:
    """The times of a step have one number for each rank."""
    ranks = len(event.get("step_ms", ()))
    if any(len(ms) != ranks for ms in event.get("phase_ms", {}).values()):
        raise ValueError("phase_ms has another number of ranks than step_ms")
    return event


def _only_numbers(event: Event) -> Event:
    """An epoch without fields that are no metrics."""
    return {
        name: value
        for name, value in event.items()
        if name == "event" or value is None or type(value) is float or (type(value) is int and abs(value) <= 2**53)
    }


Known = Annotated[
    RunStarted
    | Resumed
    | WithText
    | Straggler
    | Annotated[Step, AfterValidator(_ranks_agree)]
    | Annotated[Epoch, AfterValidator(_only_numbers)]
    | Evaluating
    | ProgressEvent
    | Saving
    | CheckpointSaved
    | Digests
    | RunStopped
    | RunFinished,
    Field(discriminator="event"),
]


# For fields that an event does not have; those of metrics and times have no value that could stand for them.
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
    """The event with all fields that readers show, also those that its line did not have."""
    return {**MISSING.get(event["event"], {}), **event}


def parse(line: bytes | str) -> Event | None:
    """The event in a line, without fields that are not known; None if the line is empty, torn or damaged."""
    try:
        event: Event = _adapter(Known).validate_json(line)
    except ValidationError as error:
        return _later_event(line) if error.errors()[0]["type"] == "union_tag_invalid" else None
    return event


class Parser:
    """Parses the lines of one file in their order; epochs count from 1, also in version 1, where they began at 0."""

    def __init__(self) -> None:
        self._is_version_1 = False

    def parse(self, line: bytes | str) -> Event | None:
        """The event in the next line, or None, as `parse` gives them."""
        event = parse(line)
        if event is not None and event["event"] == "run_started":
            self._is_version_1 = event.get("version") == 1
        if event is not None and self._is_version_1 and event.get("epoch") is not None:
            event["epoch"] += 1
        return event


def _later_event(line: bytes | str) -> Event | None:
    """An event of a kind that this version does not know."""
    try:
        event: Event = _adapter(Unknown).validate_json(line)
    except ValidationError:
        return None
    return event


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made when it is first needed: a rank reads no events."""
    return TypeAdapter(kind)
