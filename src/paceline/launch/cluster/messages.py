"""The messages between the coordinator of a run and its agents, as JSON: each is validated against its model."""

from __future__ import annotations

import signal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter

from paceline.launch.fork_server import RankSpec


class Message(BaseModel):
    """A message has the fields of its model and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(Message):
    """An agent introduces its host."""

    name: str
    capacity: NonNegativeInt  # the number of ranks that it can start
    versions: dict[str, str]
    config: str  # the fingerprint of its config


class Welcome(Message):
    """The coordinator admits an agent."""

    type: Literal["welcome"] = "welcome"
    name: str  # of the coordinator's host


class Refused(Message):
    """The coordinator does not admit an agent."""

    type: Literal["refused"] = "refused"
    reason: str


class Start(Message):
    """The agent starts ranks; its reports about them contain the number of this attempt."""

    type: Literal["start"] = "start"
    attempt: int
    ranks: list[RankSpec]


class Signal(Message):
    """The agent sends a signal to its ranks; also the real-time signal that makes them dump their stacks."""

    type: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, lt=signal.NSIG)]


class End(Message):
    """The agent ends its ranks by a signal, and by SIGKILL those that still run after the grace time."""

    type: Literal["end"] = "end"
    number: signal.Signals
    grace_s: float


class Over(Message):
    """The run has ended: its outcome is in the run folder, or it failed with this error and exit code."""

    type: Literal["over"] = "over"
    run_dir: str | None = None
    error: str = ""
    exit_code: int = 1


class RanksState(Message):
    """The ranks of an agent, counted from 0: the pids of running ranks, the exit codes of ended ranks."""

    attempt: int
    pids: dict[NonNegativeInt, NonNegativeInt]
    codes: dict[NonNegativeInt, int]


Answer = Welcome | Refused
Order = Start | Signal | End | Over

HELLO = TypeAdapter(Hello)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="type")])
ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="type")])
RANKS_STATE = TypeAdapter(RanksState)
