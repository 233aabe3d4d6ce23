"""Explains a hang from the files that the ranks leave in the run folder: one table of positions, and one sentence."""

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
from paceline.observe.failures import Failure
from paceline.observe.rank_log import read_end
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.user_code import is_library

REDUCTION = "the gradient reduction"
WORKERS = "DataLoader workers"  # a wait, but not for another rank
DDP = "a collective of DDP"
EXCHANGE = "a collective of Paceline"
PACELINE = str(Path(__file__).parents[1])
THREAD = re.compile(r"^.*\(most recent call first\):$", re.M)
FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$', re.M)
GLOO_ABORTS = "Is there a distributed collective mismatch in your code?"  # Gloo, just before it aborts the process


class StackFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass
class RankPosition:
    """The position of a rank at its last heartbeat; the rank writes it to a file once a second."""

    rank: int
    host: str = "?"
    pid: int = 0
    beat: int = 0  # the number of the heartbeat
    phase: str = "not started yet"
    step: int | None = None
    batch: int | None = None
    place: str = "not started yet"  # phase, epoch, step and batch in words
    location: str | None = None  # file:line of the innermost frame in the user's code
    waits_in: str | None = None  # the collective or REDUCTION, DDP, EXCHANGE, WORKERS
    idle_s: float = 0.0
    log_start: int = 0  # where this attempt's part of the log begins
    is_silent: bool = False  # set by other ranks: it writes no more heartbeats

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.waits_in not in (None, WORKERS) and not self.is_silent

    @property
    def state(self) -> str:
        """The state that the line of the user's code does not show; empty if there is nothing to add."""
        if self.is_silent:
            return "its interpreter does not respond"
        return f"waits {'for' if self.waits_in == WORKERS else 'in'} {self.waits_in}" if self.waits_in else ""

    @property
    def wait(self) -> str:
        """The operation that it waits in, such as "the gradient reduction of step 7" or "all_reduce at train.py:20"."""
        where = f" at {_short(self.location)}" if self.location else ""
        if self.waits_in != REDUCTION:
            return f"{self.waits_in}{where or f' ({self.place})'}"
        # The managed loop counts steps; in the user's own loop only batches are known.
        unit, number = ("batch", self.batch) if where else ("step", self.step)
        return self.waits_in + (f" of {unit} {number}" if number is not None else "") + where

    @property
    def activity(self) -> str:
        """The activity of a rank that does not wait for another rank, as a phrase that follows "is"."""
        where = f"in `{_short(self.location)}`" if self.location else f"outside your code ({self.place})"
        if not self.pid:
            return "not started yet"
        if self.is_silent:
            return f"stuck {where} (its interpreter does not respond)"
        return f"waiting for {WORKERS}, {where}" if self.waits_in == WORKERS else where


def explain(first: Failure, folder: RunFolder, world_size: int) -> Failure:
    """The first failure, or its cause if the ranks have called different collectives; called by the launcher."""
    if not (first.is_echo or first.is_killed):
        return first
    positions = [read_position(folder, rank) for rank in range(world_size)]
    logs = {position.rank: read_end(folder.log(position.rank), position.log_start) for position in positions}
    aborted = [rank for rank, log in logs.items() if GLOO_ABORTS in log]
    if not aborted and not len(failures.read(folder, range(world_size))) == world_size > 1:
        return first
    positions = [position_in_dump(p, folder) if p.rank in aborted else p for p in positions]
    cause = mismatch_sentence(positions)
    report = hang_report(positions, "the ranks have called different collectives", cause, folder.logs)
    return replace(first, error=failures.MISMATCH, text=cause, report=report, is_echo=False, is_killed=False)


def write_hang(positions: list[RankPosition], by: int, timeout_s: float, folder: RunFolder) -> str:
    """Write a hang to the run folder, as the failure of the rank `by` that detected it; return the report."""
    not_waiting = [position for position in positions if not position.is_waiting]
    cause, culprit = cause_sentence(positions, timeout_s), (not_waiting or positions)[0]
    heading = f"no rank has made progress for {timeout_s:g} s (hang_timeout_s={timeout_s:g}; 0 waits forever)"
    report = hang_report(positions, heading, cause, folder.logs)
    # Collectives of Paceline itself match; if the ranks wait for each other in them, a restart may succeed.
    is_users = any(position.location for position in positions)
    is_mismatch = is_users and not not_waiting and len({position.wait for position in positions}) > 1
    failure = Failure(
        rank=by, host=culprit.host, place=culprit.place, text=cause,
        error=failures.MISMATCH if is_mismatch else failures.HANG,
        location=culprit.location, log=str(folder.log(culprit.rank)), time=time.time(), report=report,
    )  # fmt: skip
    with suppress(OSError):
        failures.write(failure, folder)
        write_text(folder.hang, report + "\n")
    return report


def read_position(folder: RunFolder, rank: int) -> RankPosition:
    """The position that a rank wrote last; the default position if it wrote none."""
    try:
        return RankPosition(**json.loads(folder.place(rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # TypeError: written by another version
        return RankPosition(rank)


def position_in_dump(position: RankPosition, folder: RunFolder) -> RankPosition:
    """The position from the last stack dump in the rank's log, which is newer than its last heartbeat."""
    stacks = stacks_in(read_end(folder.log(position.rank), position.log_start))
    if not stacks:
        return position
    location, waits_in = location_in(stacks[-1])
    return replace(position, location=location, waits_in=waits_in, phase=f"last seen {position.phase}", batch=None)


def location_in(frames: Iterable[StackFrame]) -> tuple[str | None, str | None]:
    """The user's innermost file:line, and the operation it waits in; `frames` starts with the innermost frame."""
    waits_in = None
    for depth, frame in enumerate(frames):
        if not is_library(frame.file):
            return f"{frame.file}:{frame.line}", waits_in
        if not depth and frame.file.startswith(PACELINE):
            waits_in = EXCHANGE  # no other part of Paceline's code takes long
        # The outermost name is the clearest: all_gather_object, not the all_gather inside it.
        waits_in = _wait_of(frame) or waits_in
    return None, waits_in


def _wait_of(frame: StackFrame) -> str | None:
    module, name = "/".join(Path(frame.file).parts[-3:]), frame.function
    if module == "torch/distributed/distributed_c10d.py" and not name.startswith("_"):
        return name
    if (module, name) == ("torch/autograd/graph.py", "_engine_run_backward") or name == "sum_after_backward":
        return REDUCTION  # with DDP, the end of backward waits for the other ranks
    if module == "torch/distributed/utils.py" or (module == "nn/parallel/distributed.py" and name == "_pre_forward"):
        return DDP  # buffers before a forward; before the second one, also the order of the buckets
    if module == "utils/data/dataloader.py" and name == "_try_get_data":
        return WORKERS
    return None


def stacks_in(dump: str) -> list[list[StackFrame]]:
    """The stacks in a dump of faulthandler, one per thread; the last one is the main thread's."""
    blocks = THREAD.split(dump)[1:]
    return [[StackFrame(file, int(line), name) for file, line, name in FRAME.findall(block)] for block in blocks]


def hang_report(positions: Sequence[RankPosition], heading: str, cause: str, logs: Path) -> str:
    """The complete report: a heading, one row per rank, the cause, and the path of the stacks."""
    rows = [("rank", "host", "step", "phase", "your code", "")]
    for p in positions:
        step = "–" if p.step is None else str(p.step)
        rows.append((str(p.rank), p.host, step, p.phase, p.location or "–", p.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([heading, *(f"  {line}" for line in table), cause, f"  all stacks: {logs}/rank-*.log"])


def cause_sentence(positions: Sequence[RankPosition], seconds: float) -> str:
    """One sentence with the ranks that do not wait, and the ranks that wait for them."""
    active = _grouped((p.rank, p.activity) for p in positions if not p.is_waiting)
    waiting = _grouped((p.rank, p.wait) for p in positions if p.is_waiting)
    if not waiting and len(positions) == 1:
        return f"rank {positions[0].rank} is {positions[0].activity} and has made no progress for {seconds:.0f} s"
    if not active and len(waiting) == 1:
        return f"all ranks wait in {waiting[0][1]}; check the network between them"
    if not active:
        return mismatch_sentence(positions)
    target = "it" if sum(len(ranks) for ranks, _ in active) == 1 else "them"
    parts = [f"{_ranks(ranks, 'is', 'are')} {activity}" for ranks, activity in active]
    parts += [f"{_ranks(ranks, 'waits', 'wait')} for {target} in {wait}" for ranks, wait in waiting]
    return "; ".join(parts)


def mismatch_sentence(positions: Sequence[RankPosition]) -> str:
    """The sentence for ranks that have called different collectives."""
    groups = _grouped((p.rank, f"in {p.wait}" if p.is_waiting else p.activity) for p in positions)
    listed = ", ".join(f"{_ranks(ranks)} {text}" for ranks, text in groups)
    return f"the ranks wait for each other in different places: {listed}; their collectives do not match"


def _grouped(texts: Iterable[tuple[int, str]]) -> list[tuple[list[int], str]]:
    """The ranks that share each text, ordered by the first rank."""
    by_text = groupby(sorted(texts, key=lambda item: item[1]), key=lambda item: item[1])
    return sorted(([rank for rank, _ in group], text) for text, group in by_text)


def _ranks(ranks: Sequence[int], *verbs: str) -> str:
    """Ranks and a verb in the singular or plural, such as "ranks 0, 2 wait"."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    noun, verb = ("rank", verbs[:1]) if len(ranks) == 1 else ("ranks", verbs[1:])
    return " ".join([noun, listed, *verb])


def _short(location: str | None) -> str:
    return Path(location).name if location else "?"
