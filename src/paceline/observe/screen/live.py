"""The live view of a run: events update a state, from which the lines to show are computed (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.formatting import duration
from paceline.observe.bottleneck import find_bottleneck
from paceline.observe.event_types import values_in

Event = Mapping[str, Any]

SPEED_S = 300.0  # time constant of the mean speed from which the time left is computed
SMOOTHING_S = 10.0  # time constant of the numbers that are shown
NARROW = 72  # columns; below that, units are dropped to keep the bar
GAP = "  "


@dataclass(frozen=True)
class DecayingMean:
    """The mean duration of something that happens repeatedly; recent durations count more."""

    seconds: float = 0.0
    times: float = 0.0

    def add(self, seconds: float, times: int) -> DecayingMean:
        """The mean after `times` more occurrences, which took `seconds` in total."""
        kept = math.exp(-seconds / SPEED_S)
        return DecayingMean(self.seconds * kept + seconds, self.times * kept + times)

    @property
    def each(self) -> float:
        """Seconds per occurrence; 0 if none was added."""
        return self.seconds / self.times if self.times else 0.0


@dataclass(frozen=True)
class LiveState:
    """The state of a run according to its events so far."""

    pace: Event | None = None  # the newest `pace` event
    recorded: Event | None = None  # the newest `step` event
    part: Event | None = None  # of a current evaluation, or of a pass of the user's own loop
    epoch: Event | None = None  # the newest `epoch` event
    ends: Mapping[int, int] = field(default_factory=dict)  # epoch → the step that it ended with
    step_s: DecayingMean = field(default_factory=DecayingMean)
    evaluation_s: DecayingMean = field(default_factory=DecayingMean)
    updated: float | None = None  # time of the last event about training, by the run's clock
    smooth: Mapping[str, Sequence[float]] = field(default_factory=dict)  # smoothed numbers
    lanes: int | None = None  # of a step
    smooth_s: float = 0.0  # weight of the smoothed numbers, in seconds


def after(state: LiveState, event: Event) -> LiveState:
    """The state after one more event."""
    match event["event"]:
        case "run_started" | "restarted" | "run_stopped":
            # Measurements belong to one attempt of the ranks.
            return LiveState(ends=state.ends, lanes=event.get("lanes", state.lanes))
        case "step":
            state = replace(state, recorded=event)
            return _after_pace(state, event) if has_pace(event) else state
        case "pace":
            return _after_pace(state, event)
        case "epoch":
            ends = {**state.ends, event["epoch"]: event["step"]}
            mean, updated = state.evaluation_s, state.updated
            if updated is not None:
                mean = mean.add(max(event["time"] - updated, 0.0), 1)
                updated = event["time"]
            return replace(state, epoch=event, ends=ends, evaluation_s=mean, updated=updated, part=None)
        case "evaluation":
            return replace(state, part=None, updated=event["time"] if state.updated is not None else None)
        case "evaluating" | "progress":
            return replace(state, part=event)
    return state


def has_pace(step: Event) -> bool:
    """Whether a `step` event has the fields of a `pace` event, as in version 1 of the events."""
    return "samples_per_s" in step


def _after_pace(state: LiveState, event: Event) -> LiveState:
    mean, seconds = state.step_s, 0.0
    if state.pace is not None and state.updated is not None:
        seconds = max(event["time"] - state.updated, 0.0)
        mean = mean.add(seconds, max(event["step"] - state.pace["step"], 0))
    numbers = {
        "samples_per_s": [event.get("samples_per_s", 0.0)],
        "step": event.get("step_ms", []),
        **event.get("phase_ms", {}),
    }
    # The first `pace` event has no duration and thus no weight: the next one replaces it. Its steps load and compile.
    older = state.smooth_s * math.exp(-seconds / SMOOTHING_S)
    kept = older / (older + seconds) if older else 0.0
    smooth = {name: _blended(state.smooth.get(name, ()), values, kept) for name, values in numbers.items()}
    state = replace(state, smooth=smooth, smooth_s=older + seconds)
    return replace(state, pace=event, part=None, step_s=mean, updated=event["time"])


def _blended(old: Sequence[float], new: Sequence[float], kept: float) -> Sequence[float]:
    """The weighted mean of two measurements; `kept` is the weight of the older one."""
    if len(old) != len(new):
        return new
    return [kept * before + (1 - kept) * now for before, now in zip(old, new, strict=True)]


def left_s(state: LiveState) -> float | None:
    """Seconds from the last event about training to the end of the run, including evaluations; None if unknown."""
    pace = state.pace
    if pace is None or pace["steps"] is None:
        return None
    # A mean needs two events; until then the ranks' own clocks are used.
    each = state.step_s.each or max(pace.get("step_ms", ()), default=0.0) / 1e3
    is_ended = state.epoch is not None and state.epoch["epoch"] >= pace["epoch"]
    evaluations = max(pace["epochs"] - pace["epoch"] + 1 - is_ended, 0)
    return (pace["steps"] - pace["step"]) * each + evaluations * state.evaluation_s.each if each else None


def epoch_part(state: LiveState) -> tuple[int, int] | None:
    """The steps done in the current epoch, and the steps that it has; None if unknown."""
    pace = state.pace
    if pace is None:
        return None
    epoch, ends = pace["epoch"], {0: 0, **state.ends}
    length = None
    if epoch - 2 in ends and epoch - 1 in ends:
        length = ends[epoch - 1] - ends[epoch - 2]
    elif pace["steps"] is not None and pace["steps"] % pace["epochs"] == 0:
        length = pace["steps"] // pace["epochs"]
    if not length:
        return None
    done = pace["step"] - ends.get(epoch - 1, (epoch - 1) * length)
    return (done, length) if 0 <= done <= length else None


def number_text(value: float | None) -> str:
    """A loss or a metric, with a useful number of digits."""
    if value is None:
        return "-"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 or 1e5 <= abs(value) < math.inf else f"{value:.4f}"


def left_text(seconds: float | None) -> str:
    """The time left, in one or two units."""
    return "time left unknown" if seconds is None else f"{duration(seconds)} left"


def epoch_text(pace: Event) -> str:
    """The current epoch and the number of epochs."""
    return f"epoch {pace['epoch']}/{pace['epochs']}"


def training_texts(step: Event | None) -> list[str]:
    """The loss, the learning rate and the further values of a `step` event."""
    values = list(values_in(step or {}))
    loss = step["loss"] if step else None
    texts = [f"loss {number_text(loss)}"] if loss is not None or not values else []
    if step and "lr" in step:
        texts.append(f"lr {step['lr']:.3g}")
    return texts + [f"{name} {number_text(value)}" for name, value in values]


def speed_text(samples_per_s: float) -> str:
    """The speed of training."""
    return f"{samples_per_s:,.0f} samples/s"


def metric_texts(epoch: Event) -> list[str]:
    """The losses and metrics of an `epoch` event."""
    return [
        f"{name} {number_text(value)}" for name, value in epoch.items() if isinstance(value, float) and name != "time"
    ]


def _memory_text(pace: Event) -> str:
    used = pace.get("memory_mb", [])
    if not used:
        return ""
    most = f"{max(used):.0f} MB" if max(used) < 1e4 else f"{max(used) / 1e3:.1f} GB"
    return most if len(used) == 1 else f"{most} a rank"


class BarLine(NamedTuple):
    """A line with a progress bar; the bar is omitted if the total is unknown."""

    label: str
    done: int
    total: int | None
    unit: str
    note: str = ""


def view(state: LiveState, age_s: float, width: int) -> RenderableType:
    """The lines to show `age_s` after the last event about training; their number stays the same during a run."""
    bars, rows = list(_bars(state, age_s)), list(_rows(state))
    if not bars:
        return Text()
    margin = max(len(label) for label in [*(bar.label for bar in bars), *(label for label, _, _ in rows)]) + 2
    lines: list[RenderableType] = [
        "",
        _bars_grid(bars, margin, width),
    ]  # an empty line below the output of rank 0
    for label, texts, style in rows:
        text = Text(label.ljust(margin), style="dim", no_wrap=True, overflow="ellipsis")
        lines.append(text.append(_fitting(texts, width - margin), style=f"not dim {style}"))
    return Group(*lines)


def _bars(state: LiveState, age_s: float) -> Iterator[BarLine]:
    pace, part = state.pace, state.part
    if pace is not None:
        left = left_s(state)
        yield BarLine("run", pace["step"], pace["steps"], "steps", left_text(left and max(left - age_s, 0.0)))
        yield _epoch_bar(state, pace)
    elif part is not None and part["event"] == "progress":
        yield BarLine(f"epoch {part['epoch']}", part["batch"] + 1, part["batches"], "batches", part["phase"])
    elif part is not None:
        yield BarLine("evaluating", part["batch"], part["batches"], "batches")


def _epoch_bar(state: LiveState, pace: Event) -> BarLine:
    # As wide as the label of the last epoch, so that the bars do not move.
    label = epoch_text(pace).ljust(len(f"epoch {pace['epochs']}/{pace['epochs']}"))
    if state.part is not None:
        return BarLine(label, state.part["batch"], state.part["batches"], "", "evaluating")
    done, total = epoch_part(state) or (0, None)
    return BarLine(label, done, total, "steps" if total else "", speed_text(state.smooth["samples_per_s"][0]))


def _rows(state: LiveState) -> Iterator[tuple[str, list[str], str]]:
    """Label, texts and style of the lines below the bars."""
    if state.pace is None:
        return
    metrics = [] if state.epoch is None else metric_texts(state.epoch)
    # The training loss is shown only if there is no other metric.
    metrics = [text for text in metrics if not text.startswith("train_loss")] or metrics
    phase_ms = {name: values for name, values in state.smooth.items() if name not in ("samples_per_s", "step")}
    bottleneck = find_bottleneck(state.smooth["step"], phase_ms, state.lanes)
    yield "training", [*training_texts(state.recorded), _memory_text(state.pace)], ""
    yield "evaluation", metrics, ""
    yield "slowest", [str(bottleneck or "")], "yellow" if bottleneck and bottleneck.rank is not None else ""


def _bars_grid(bars: Iterable[BarLine], margin: int, width: int) -> Table:
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


def _counts(bar: BarLine, *, has_unit: bool) -> str:
    """The number done and the total, in a constant width: a bar that changes its length is hard to read."""
    unit = f" {bar.unit}" if has_unit and bar.unit else ""
    if bar.total is None:
        return f"{bar.done:,}{unit}" if bar.unit else ""
    total = f"{bar.total:,}"
    return f"{bar.done:>{len(total)},}/{total}{unit}"


def _fitting(texts: Iterable[str], width: int) -> str:
    """The texts that fit into a line, each with space for longer values; a dash if there are none."""
    line = ""
    for text in filter(None, texts):
        name, _, value = text.partition(" ")
        longer = f"{line}{name} {value:<8}{GAP}"
        if line and len(longer.rstrip()) > width:
            break
        line = longer
    return line.rstrip() or "-"
