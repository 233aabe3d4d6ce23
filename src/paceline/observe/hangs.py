"""The story of a hang, by what the ranks leave in the run folder: one table of where they are, and one sentence."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from paceline.observe import failures
from paceline.observe.failures import LIBRARIES, Failure
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder

REDUCTION = "the gradient reduction"
WORKERS = "DataLoader workers"  # a wait, but for no other rank
DDP = "an exchange of DDP's own"
EXCHANGE = "an exchange of the ranks"
PACELINE = str(Path(__file__).parents[1])
THREAD = re.compile(r"^.*\(most recent call first\):$", re.M)
FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$', re.M)


GLOO_ABORTS = "Is there a distributed collective mismatch in your code?"  # Gloo, just before it aborts the process


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass
class Place:
    """Where a rank was at its last beat, as it tells the others."""

    rank: int
    host: str = "?"
    pid: int = 0
    beat: int = 0  # counts up
    phase: str = "not started yet"
    step: int | None = None
    batch: int | None = None
    place: str = "not started yet"  # phase, epoch, step and batch in words
    location: str | None = None  # file:line of the innermost code of the user's own
    waits_in: str | None = None
    idle_s: float = 0.0
    log_start: int = 0  # where this attempt's part of the log begins
    is_silent: bool = False  # said by others: it has stopped to beat

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.waits_in not in (None, WORKERS) and not self.is_silent

    @property
    def state(self) -> str:
        """What the user's code does not show."""
        if self.is_silent:
            return "its interpreter does not answer"
        return f"waits {'for' if self.waits_in == WORKERS else 'in'} {self.waits_in}" if self.waits_in else ""

    @property
    def wait(self) -> str:
        """Such as "the gradient reduction of step 7", or "all_reduce at train.py:20"."""
        where = f" at {_short(self.location)}" if self.location else ""
        if self.waits_in != REDUCTION:
            return f"{self.waits_in}{where or f' ({self.place})'}"
        # The managed loop counts steps; in the user's own loop only batches are known.
        unit, number = ("batch", self.batch) if where else ("step", self.step)
        return self.waits_in + (f" of {unit} {number}" if number is not None else "") + where

    @property
    def doing(self) -> str:
        """What a rank is at that waits for no other, to follow "is"."""
        where = f"in `{_short(self.location)}`" if self.location else f"in no code of yours ({self.place})"
        if not self.pid:
            return "not started yet"
        if self.is_silent:
            return f"stuck {where} (its interpreter does not answer)"
        return f"waiting for {WORKERS}, {where}" if self.waits_in == WORKERS else where


def explain(first: Failure, folder: RunFolder, world_size: int) -> Failure:
    """For the launcher: the first failure, or what is behind it where the ranks have called different collectives."""
    if not (first.is_echo or first.is_killed):
        return first
    places = [read_place(folder, rank) for rank in range(world_size)]
    logs = {place.rank: log_since(folder.log(place.rank), place.log_start) for place in places}
    aborted = [rank for rank, log in logs.items() if GLOO_ABORTS in log]
    if not aborted and not len(failures.written(folder, range(world_size))) == world_size > 1:
        return first
    places = [place_by_dump(place, folder) if place.rank in aborted else place for place in places]
    cause = mismatch(places)
    story = tell(places, "the ranks have called different collectives", cause, folder.logs)
    return replace(first, error=failures.MISMATCH, text=cause, story=story, is_echo=False, is_killed=False)


def write_hang(places: list[Place], by: int, timeout_s: float, folder: RunFolder) -> str:
    """Write down a hang, as the failure of the rank `by` that has found it; the whole story."""
    holding = [place for place in places if not place.is_waiting]
    cause, at = cause_of(places, timeout_s), (holding or places)[0]
    heading = f"no rank has moved for {timeout_s:g} s (hang_timeout_s={timeout_s:g}; 0 waits for ever)"
    story = tell(places, heading, cause, folder.logs)
    # Collectives of Paceline's own match; where they wait for each other all the same, it may not come again.
    is_users = any(place.location for place in places)
    is_mismatch = is_users and not holding and len({place.wait for place in places}) > 1
    failed = Failure(
        rank=by, host=at.host, place=at.place, error=failures.MISMATCH if is_mismatch else failures.HANG, text=cause,
        location=at.location, log=str(folder.log(at.rank)), time=time.time(), story=story,
    )  # fmt: skip
    with suppress(OSError):
        failures.write(failed, folder)
        write_text(folder.hang, story + "\n")
    return story


def read_place(folder: RunFolder, rank: int) -> Place:
    """The place that a rank told last; one of a rank that has not started if it told none."""
    try:
        return Place(**json.loads(folder.place(rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # TypeError: written by another version
        return Place(rank)


def place_by_dump(place: Place, folder: RunFolder) -> Place:
    """A place by the last dump in its log, which is newer than its last beat."""
    stacks = stacks_in(log_since(folder.log(place.rank), place.log_start))
    if not stacks:
        return place
    location, waits = place_in(stacks[-1])
    return replace(place, location=location, waits_in=waits, phase=f"last seen {place.phase}", batch=None)


def log_since(path: Path, start: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - (1 << 20)))
        return file.read().decode(errors="replace")
    return ""


def place_in(frames: Iterable[Frame]) -> tuple[str | None, str | None]:
    """The user's innermost file:line, and what is waited for further in; from a stack, innermost frame first."""
    waits = None
    for depth, frame in enumerate(frames):
        if not frame.file.startswith(LIBRARIES):
            return f"{frame.file}:{frame.line}", waits
        if not depth and frame.file.startswith(PACELINE):
            waits = EXCHANGE  # nothing else can take long in code of ours
        waits = _wait_of(frame) or waits  # the outermost says it best: all_gather_object, not its all_gather
    return None, waits


def _wait_of(frame: Frame) -> str | None:
    module, name = "/".join(Path(frame.file).parts[-3:]), frame.function
    if module == "torch/distributed/distributed_c10d.py" and not name.startswith("_"):
        return name
    if (module, name) == ("torch/autograd/graph.py", "_engine_run_backward") or name == "reduce_after_backward":
        return REDUCTION  # with DDP, the end of backward waits for the other ranks
    if module == "torch/distributed/utils.py" or (module == "nn/parallel/distributed.py" and name == "_pre_forward"):
        return DDP  # buffers before a forward; before the second one, also the order of the buckets
    if module == "utils/data/dataloader.py" and name == "_try_get_data":
        return WORKERS
    return None


def stacks_in(dump: str) -> list[list[Frame]]:
    """The stacks of a dump of faulthandler, one a thread; the last one is the main thread's."""
    blocks = THREAD.split(dump)[1:]
    return [[Frame(file, int(line), name) for file, line, name in FRAME.findall(block)] for block in blocks]


def tell(places: Sequence[Place], heading: str, cause: str, logs: Path) -> str:
    """The whole story: a heading, one row a rank, the cause, and where to read on."""
    rows = [("rank", "host", "step", "phase", "your code", "")]
    for p in places:
        step = "–" if p.step is None else str(p.step)
        rows.append((str(p.rank), p.host, step, p.phase, p.location or "–", p.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([heading, *(f"  {line}" for line in table), cause, f"  all stacks: {logs}/rank-*.log"])


def cause_of(places: Sequence[Place], seconds: float) -> str:
    """One sentence: who keeps whom waiting."""
    holding = _grouped((p.rank, p.doing) for p in places if not p.is_waiting)
    waiting = _grouped((p.rank, p.wait) for p in places if p.is_waiting)
    if not waiting and len(places) == 1:
        return f"rank {places[0].rank} is {places[0].doing} and has not moved for {seconds:.0f} s"
    if not holding and len(waiting) == 1:
        return f"all ranks have come to {waiting[0][1]} and wait there; look at what connects them"
    if not holding:
        return mismatch(places)
    held = [f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {doing}" for ranks, doing in holding]
    whom = "it" if sum(len(ranks) for ranks, _ in holding) == 1 else "them"
    waits = [f"{_ranks(ranks)} {_verb(ranks)} for {whom} in {wait}" for ranks, wait in waiting]
    return "; ".join([*held, *waits])


def mismatch(places: Sequence[Place]) -> str:
    """The sentence for ranks that have called different collectives."""
    told = _grouped((p.rank, f"in {p.wait}" if p.is_waiting else p.doing) for p in places)
    where = ", ".join(f"{_ranks(ranks)} {wait}" for ranks, wait in told)
    return f"the ranks wait for each other in different places: {where}; their collectives do not match"


def _grouped(told: Iterable[tuple[int, str]]) -> list[tuple[list[int], str]]:
    """The ranks of each text, in the order of their first ranks."""
    by_text = groupby(sorted(told, key=lambda item: item[1]), key=lambda item: item[1])
    return sorted(([rank for rank, _ in group], text) for text, group in by_text)


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _short(location: str | None) -> str:
    return Path(location).name if location else "?"
