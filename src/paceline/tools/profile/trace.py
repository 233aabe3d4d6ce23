"""Reads and writes traces of the profiler: operators by their cost, the kinds of work of a GPU, and the trace file."""

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

from paceline.engine.clock import PHASES

# The kinds of GPU work, the most useful first: where work overlaps, the first kind counts.
KINDS = ("compute", "reduction", "copies")
OPERATOR, KERNEL, COPIES = "cpu_op", "kernel", ("gpu_memcpy", "gpu_memset")  # as traces call them
BASE_TIME = re.compile(r'"baseTimeNanoseconds": (\d+)')
EVENTS = '"traceEvents": ['
PHASE_TRACK = 1  # no thread has this number
MAX_NAMES = 200  # the number of operators that a rank sends to the others


class PhaseStart(NamedTuple):
    """The time when a phase began, by the clock of the trace: nanoseconds since 1970."""

    phase: int
    time_ns: int


class Span(NamedTuple):
    """An operator, a kernel or a copy: where and when it ran, in microseconds."""

    category: str
    name: str
    track: tuple[object, object]
    begin: float
    end: float


class OperatorCost(NamedTuple):
    """The total time of an operator in microseconds, and the number of its calls."""

    us: float
    calls: int


# --- phases ----------------------------------------------------------------------------------------------------------


def spent_ns(marks: Sequence[PhaseStart], begin: int, end: int) -> list[int]:
    """Nanoseconds of each phase between two times."""
    spent = [0] * len(PHASES)
    for mark, after in pairwise([*marks, PhaseStart(0, end)]):
        spent[mark.phase] += max(0, min(after.time_ns, end) - max(mark.time_ns, begin))
    return spent


def events_of(marks: Sequence[PhaseStart], base_ns: int, pid: int) -> list[dict[str, object]]:
    """The phases as events of a Chrome trace, on a separate track, because backward and reduction do not nest."""
    place = {"pid": pid, "tid": PHASE_TRACK}
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


def write(profiler: torch.profiler.profile, marks: Sequence[PhaseStart], path: Path, pid: int) -> list[Span]:
    """Write the trace with the phases to a compressed file, atomically; returns the operators and kernels in it."""
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
    # Torch's own tables of operators take minutes for a deep model.
    return [
        Span(event["cat"], event["name"], (event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"])
        for event in json.loads(text, strict=False)["traceEvents"]
        if event["ph"] == "X" and event.get("cat") in (OPERATOR, KERNEL, *COPIES)
    ]


def costs_of(spans: Iterable[Span], device: str) -> dict[str, OperatorCost]:
    """The operators that take the most time, without those that they call; on a GPU, the kernels and copies."""
    us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    callers: list[Span] = []
    chosen = (span for span in spans if (span.category == OPERATOR) == (device == "cpu"))
    for span in sorted(chosen, key=lambda span: (str(span.track), span.begin, -span.end)):
        us[span.name] += span.end - span.begin
        calls[span.name] += 1
        if device == "cpu":  # on a GPU, kernels that overlap do not call each other
            while callers and (callers[-1].track != span.track or callers[-1].end <= span.begin):
                callers.pop()
            if callers:
                us[callers[-1].name] -= span.end - span.begin
                calls[span.name] -= span.name == callers[-1].name  # an overload that calls another is one call
            callers.append(span)
    costliest = sorted(us, key=us.__getitem__, reverse=True)[:MAX_NAMES]
    return {name: OperatorCost(us[name], calls[name]) for name in costliest}


def busy_us(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds of each kind of work of a GPU; where several overlap, the first of `KINDS` counts."""
    work = [span for span in spans if span.category != OPERATOR]
    seen: list[tuple[float, float]] = []
    busy, before = {}, 0.0
    for kind in KINDS:
        seen += [(span.begin, span.end) for span in work if kind_of(span) == kind]
        covered = _covered(seen)
        busy[kind], before = covered - before, covered
    return busy


def kind_of(span: Span) -> str:
    """The kind of work of a GPU kernel or copy."""
    if span.category in COPIES:
        return "copies"
    return "reduction" if span.name.startswith("nccl") else "compute"


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The total length of intervals, overlaps counted once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
