"""A run as a few lines that stay in their place: events become facts, and facts become lines (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.pace import slowest

Event = Mapping[str, Any]

SPEED_S = 300.0  # for so long a measured speed counts for the time that is left
CALM_S = 10.0  # in so long what is shown follows a change
NARROW = 72  # columns, below which words go before the bar does
GAP = "  "


# --- what is known ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """Seconds for each of many like things, of which recent ones count more."""

    seconds: float = 0.0
    times: float = 0.0

    def add(self, seconds: float, times: int) -> Mean:
        """Take in some of them, which took `seconds` together."""
        kept = math.exp(-seconds / SPEED_S)
        return Mean(self.seconds * kept + seconds, self.times * kept + times)

    @property
    def each(self) -> float:
        """Seconds for one; 0 if none has been seen."""
        return self.seconds / self.times if self.times else 0.0


@dataclass(frozen=True)
class Facts:
    """What is known of a run by now."""

    pace: Event | None = None  # the newest
    recorded: Event | None = None  # the newest `step` event
    part: Event | None = None  # an evaluation that goes on, or a pass of the user's own loop
    ended: Event | None = None  # the last epoch
    ends: Mapping[int, int] = field(default_factory=dict)  # epoch → the step that it ended with
    step_s: Mean = field(default_factory=Mean)
    evaluation_s: Mean = field(default_factory=Mean)
    told: float | None = None  # when training was last heard of, by the run's clock
    smooth: Mapping[str, Sequence[float]] = field(default_factory=dict)  # numbers that must not jump
    smooth_s: float = 0.0  # how much time is in them


def after(facts: Facts, event: Event) -> Facts:
    """What is known once an event has happened, too."""
    match event["event"]:
        case "run_started" | "restarted" | "run_stopped":
            return Facts(ends=facts.ends)  # a life of the ranks has ended, and what was measured in it
        case "step":
            facts = replace(facts, recorded=event)
            return _after_pace(facts, event) if has_pace(event) else facts
        case "pace":
            return _after_pace(facts, event)
        case "epoch":
            ends = {**facts.ends, event["epoch"]: event["step"]}
            mean, told = facts.evaluation_s, facts.told
            if told is not None:
                mean = mean.add(max(event["time"] - told, 0.0), 1)
                told = event["time"]
            return replace(facts, ended=event, ends=ends, evaluation_s=mean, told=told, part=None)
        case "evaluating" | "progress":
            return replace(facts, part=event)
    return facts


def has_pace(step: Event) -> bool:
    """Whether a `step` event has the fields of a `pace` event, as in version 1 of the events."""
    return "samples_per_s" in step


def _after_pace(facts: Facts, event: Event) -> Facts:
    mean, seconds = facts.step_s, 0.0
    if facts.pace is not None and facts.told is not None:
        seconds = max(event["time"] - facts.told, 0.0)
        mean = mean.add(seconds, max(event["step"] - facts.pace["step"], 0))
    numbers = {
        "samples_per_s": [event.get("samples_per_s", 0.0)],
        "step": event.get("step_ms", []),
        **event.get("phase_ms", {}),
    }
    # The first steps of a run, which load and compile things, have no time of their own: the next ones replace them.
    older = facts.smooth_s * math.exp(-seconds / CALM_S)
    kept = older / (older + seconds) if older else 0.0
    smooth = {name: _blended(facts.smooth.get(name, ()), values, kept) for name, values in numbers.items()}
    facts = replace(facts, smooth=smooth, smooth_s=older + seconds)
    return replace(facts, pace=event, part=None, step_s=mean, told=event["time"])


def _blended(old: Sequence[float], new: Sequence[float], kept: float) -> Sequence[float]:
    """Between two measurements, as much of the older one as is kept."""
    if len(old) != len(new):
        return new
    return [kept * before + (1 - kept) * now for before, now in zip(old, new, strict=True)]


def left_s(facts: Facts) -> float | None:
    """Seconds until the run has ended, evaluations among them, counted from when training was last heard of."""
    pace = facts.pace
    if pace is None or pace["steps"] is None:
        return None
    # Until there are two points in time, the ranks' own clocks must do.
    each = facts.step_s.each or max(pace.get("step_ms", ()), default=0.0) / 1e3
    is_ended = facts.ended is not None and facts.ended["epoch"] >= pace["epoch"]
    evaluations = max(pace["epochs"] - pace["epoch"] + 1 - is_ended, 0)
    return (pace["steps"] - pace["step"]) * each + evaluations * facts.evaluation_s.each if each else None


def epoch_part(facts: Facts) -> tuple[int, int] | None:
    """How many steps of its epoch are done, and of how many; None where nobody knows."""
    pace = facts.pace
    if pace is None:
        return None
    epoch, ends = pace["epoch"], {0: 0, **facts.ends}
    length = None
    if epoch - 2 in ends and epoch - 1 in ends:
        length = ends[epoch - 1] - ends[epoch - 2]
    elif pace["steps"] is not None and pace["steps"] % pace["epochs"] == 0:
        length = pace["steps"] // pace["epochs"]
    if not length:
        return None
    done = pace["step"] - ends.get(epoch - 1, (epoch - 1) * length)
    return (done, length) if 0 <= done <= length else None


# --- in words -----------------------------------------------------------------------------------------------


def number_text(value: float | None) -> str:
    """A loss or a metric, with digits that say something."""
    if value is None:
        return "-"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 or 1e5 <= abs(value) < math.inf else f"{value:.4f}"


def left_text(seconds: float | None) -> str:
    """Time left, as coarse as people speak of it."""
    if seconds is None:
        return "time left unknown"
    whole = max(round(seconds), 0)
    minutes = round(seconds / 60)
    if whole < 90:
        return f"{whole} s left"
    if minutes < 90:
        return f"{minutes} min left"
    if minutes < 36 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min left"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h left"


def epoch_text(pace: Event) -> str:
    """Which epoch it is, and of how many."""
    return f"epoch {pace['epoch']}/{pace['epochs']}"


def training_texts(step: Event | None) -> list[str]:
    """The loss and the learning rate of a `step` event."""
    texts = [f"loss {number_text(step['loss'] if step else None)}"]
    if step and "lr" in step:
        texts.append(f"lr {step['lr']:.3g}")
    return texts


def speed_text(samples_per_s: float) -> str:
    """How fast it goes."""
    return f"{samples_per_s:,.0f} samples/s"


def measured_texts(epoch: Event) -> list[str]:
    """What an `epoch` event says about how good the model is."""
    return [
        f"{name} {number_text(value)}" for name, value in epoch.items() if isinstance(value, float) and name != "time"
    ]


def _memory_text(pace: Event) -> str:
    used = pace.get("memory_mb", [])
    if not used:
        return ""
    most = f"{max(used):.0f} MB" if max(used) < 1e4 else f"{max(used) / 1e3:.1f} GB"
    return most if len(used) == 1 else f"{most} a rank"


# --- in lines -----------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A line with a bar; without one where the total is unknown."""

    label: str
    done: int
    total: int | None
    unit: str
    note: str = ""


def view(facts: Facts, age_s: float, width: int) -> RenderableType:
    """The lines to show `age_s` after training was last heard of; as many in every moment of a run."""
    bars, rows = list(_bars(facts, age_s)), list(_rows(facts))
    if not bars:
        return Text()
    margin = max(len(label) for label in [*(bar.label for bar in bars), *(label for label, _, _ in rows)]) + 2
    lines: list[RenderableType] = ["", _bars_grid(bars, margin, width)]  # apart from what scrolls above
    for label, texts, style in rows:
        text = Text(label.ljust(margin), style="dim", no_wrap=True, overflow="ellipsis")
        lines.append(text.append(_fitting(texts, width - margin), style=f"not dim {style}"))
    return Group(*lines)


def _bars(facts: Facts, age_s: float) -> Iterator[Bar]:
    pace, part = facts.pace, facts.part
    if pace is not None:
        left = left_s(facts)
        yield Bar("run", pace["step"], pace["steps"], "steps", left_text(left and max(left - age_s, 0.0)))
        yield _epoch_bar(facts, pace)
    elif part is not None and part["event"] == "progress":
        yield Bar(f"epoch {part['epoch']}", part["batch"] + 1, part["batches"], "batches", part["phase"])
    elif part is not None:
        yield Bar("evaluating", part["batch"], part["batches"], "batches")


def _epoch_bar(facts: Facts, pace: Event) -> Bar:
    # As wide as that of the last epoch, so that the bars stay where they are.
    label = epoch_text(pace).ljust(len(f"epoch {pace['epochs']}/{pace['epochs']}"))
    if facts.part is not None:
        return Bar(label, facts.part["batch"], facts.part["batches"], "", "evaluating")
    done, total = epoch_part(facts) or (0, None)
    return Bar(label, done, total, "steps" if total else "", speed_text(facts.smooth["samples_per_s"][0]))


def _rows(facts: Facts) -> Iterator[tuple[str, list[str], str]]:
    """Label, texts and style of the lines below the bars."""
    if facts.pace is None:
        return
    measured = [] if facts.ended is None else measured_texts(facts.ended)
    # The loss of the epoch is told beside the others where there is nothing else.
    measured = [text for text in measured if not text.startswith("train_loss")] or measured
    phase_ms = {name: values for name, values in facts.smooth.items() if name not in ("samples_per_s", "step")}
    verdict = slowest(facts.smooth["step"], phase_ms)
    yield "training", [*training_texts(facts.recorded), _memory_text(facts.pace)], ""
    yield "evaluation", measured, ""
    yield "slowest", [str(verdict or "")], "yellow" if verdict and verdict.rank is not None else ""


def _bars_grid(bars: Iterable[Bar], margin: int, width: int) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", width=margin - 2, no_wrap=True)
    grid.add_column(ratio=1, min_width=5)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, min_width=len(speed_text(1e5)))
    for bar in bars:
        drawn = ProgressBar(bar.total, bar.done, style="bright_black", complete_style="cyan", finished_style="cyan")
        counts = _counts(bar, has_unit=width >= NARROW or bar.total is None)
        grid.add_row(bar.label, "" if bar.total is None else drawn, counts, bar.note)
    return grid


def _counts(bar: Bar, *, has_unit: bool) -> str:
    """What is done, in the width that it will have in the end: a bar that grows and shrinks is hard to read."""
    unit = f" {bar.unit}" if has_unit and bar.unit else ""
    if bar.total is None:
        return f"{bar.done:,}{unit}" if bar.unit else ""
    total = f"{bar.total:,}"
    return f"{bar.done:>{len(total)},}/{total}{unit}"


def _fitting(texts: Iterable[str], width: int) -> str:
    """As many texts as a line holds, each with room to grow; a dash if there are none."""
    line = ""
    for text in filter(None, texts):
        name, _, value = text.partition(" ")
        longer = f"{line}{name} {value:<8}{GAP}"
        if line and len(longer.rstrip()) > width:
            break
        line = longer
    return line.rstrip() or "-"
