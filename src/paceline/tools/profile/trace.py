"""What a profiler's trace tells: operators by their cost, what a GPU was busy with, and the file to look at."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.observe.clock import PHASES

# What a GPU does, the most useful first: of work that goes on at the same time, the first counts.
KINDS = ("compute", "reduction", "copies")
OPERATOR, KERNEL, COPIES = "cpu_op", "kernel", ("gpu_memcpy", "gpu_memset")  # as traces call them
BASE_TIME = re.compile(r'"baseTimeNanoseconds": (\d+)')
EVENTS = '"traceEvents": ['
TRACK = 1  # no thread has this number
MOST_NAMES = 200  # of operators that a rank tells the others


class Mark(NamedTuple):
    """The moment when a phase began, by the clock that traces go by: nanoseconds since 1970."""

    phase: int
    time_ns: int


class Span(NamedTuple):
    """An operator, a kernel or a copy: where and when it ran, in microseconds."""

    category: str
    name: str
    track: tuple[object, object]
    begin: float
    end: float


class Cost(NamedTuple):
    """What an operator has taken in all, in microseconds, and how often it was called."""

    us: float
    calls: int


# --- phases ----------------------------------------------------------------------------------------------------------


def spent_ns(marks: Sequence[Mark], begin: int, end: int) -> list[int]:
    """Nanoseconds of each phase between two moments."""
    spent = [0] * len(PHASES)
    for mark, after in pairwise([*marks, Mark(0, end)]):
        spent[mark.phase] += max(0, min(after.time_ns, end) - max(mark.time_ns, begin))
    return spent


def events_of(marks: Sequence[Mark], base_ns: int, pid: int) -> list[dict[str, object]]:
    """The phases as events of a Chrome trace, on a track of their own: backward and the sums do not nest in it."""
    place = {"pid": pid, "tid": TRACK}
    names: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "phases, on the host"}},
        {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": -1}},
    ]
    return names + [
        {
            "ph": "X", "cat": "phase", "name": PHASES[mark.phase], **place,
            "ts": (mark.time_ns - base_ns) / 1e3, "dur": (after.time_ns - mark.time_ns) / 1e3,
        }
        for mark, after in pairwise(marks)
    ]  # fmt: skip


def write(profiler: torch.profiler.profile, marks: Sequence[Mark], path: Path, pid: int) -> list[Span]:
    """The trace as a compressed file with the phases in it, seen whole or not at all; gives the work that is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        raw, packed = Path(folder) / "trace.json", Path(folder) / path.name
        profiler.export_chrome_trace(str(raw))
        text = raw.read_text(encoding="utf-8", errors="replace")
        base = BASE_TIME.search(text[:10_000])
        phases = events_of(marks, int(base[1]) if base else 0, pid)
        added = "".join(f"{json.dumps(event)},\n" for event in phases)
        with gzip.open(packed, "wt", encoding="utf-8", compresslevel=3) as file:
            file.write(text.replace(EVENTS, EVENTS + added, 1))
        packed.replace(path)
    return spans_in(text)


# --- operators and kernels -------------------------------------------------------------------------------------------


def spans_in(text: str) -> list[Span]:
    """The operators and kernels in a Chrome trace."""
    # Torch's own tables of the same take minutes for a deep model.
    return [
        Span(event["cat"], event["name"], (event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"])
        for event in json.loads(text, strict=False)["traceEvents"]
        if event["ph"] == "X" and event.get("cat") in (OPERATOR, KERNEL, *COPIES)
    ]


def costs_of(spans: Iterable[Span], device: str) -> dict[str, Cost]:
    """The dearest operators by their own time; on a GPU the kernels and copies."""
    us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    callers: list[Span] = []
    chosen = (span for span in spans if (span.category == OPERATOR) == (device == "cpu"))
    for span in sorted(chosen, key=lambda span: (str(span.track), span.begin, -span.end)):
        us[span.name] += span.end - span.begin
        calls[span.name] += 1
        if device == "cpu":  # on a GPU, what goes on at once is no part of each other
            while callers and (callers[-1].track != span.track or callers[-1].end <= span.begin):
                callers.pop()
            if callers:
                us[callers[-1].name] -= span.end - span.begin
                calls[span.name] -= span.name == callers[-1].name  # one form of an operator calls another
            callers.append(span)
    dearest = sorted(us, key=us.__getitem__, reverse=True)[:MOST_NAMES]
    return {name: Cost(us[name], calls[name]) for name in dearest}


def busy_us(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds of each kind of work of a GPU; where several go on at once, the first of `KINDS` counts."""
    pieces = [(kind_of(span), (span.begin, span.end)) for span in spans if span.category != OPERATOR]
    seen: list[tuple[float, float]] = []
    busy, before = {}, 0.0
    for kind in KINDS:
        seen += [piece for of, piece in pieces if of == kind]
        covered = _covered(seen)
        busy[kind], before = covered - before, covered
    return busy


def kind_of(span: Span) -> str:
    """What a GPU's work is for."""
    if span.category in COPIES:
        return "copies"
    return "reduction" if span.name.startswith("nccl") else "compute"


def _covered(pieces: Iterable[tuple[float, float]]) -> float:
    """The length of what some pieces of a line cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(pieces):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
