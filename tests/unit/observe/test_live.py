"""screen/live.py: the state of a run after some events, and the lines that show it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from paceline.observe.screen.live import Event, LiveState, after, epoch_part, left_s, left_text, number_text, view

HEIGHT = 6  # an empty line, two bars, three rows


def step(at: int, *, time: float = 0.0, steps: int | None = 100, epoch: int = 1, **more: Any) -> Event:
    """A `step` event of a run of 10 epochs, as in version 1 of the events."""
    fields = {"event": "step", "time": time, "step": at, "steps": steps, "epoch": epoch, "epochs": 10, "loss": 0.25}
    return {**fields, "samples_per_s": 2000.0, **more}


def pace(at: int, **more: Any) -> Event:
    """A `pace` event: the fields of a step of version 1 without loss and learning rate."""
    fields = {name: value for name, value in step(at, **more).items() if name not in ("loss", "lr")}
    return {**fields, "event": "pace"}


def recorded(at: int, **more: Any) -> Event:
    """A `step` event of version 2, which has no speed."""
    return {name: value for name, value in step(at, **more).items() if name != "samples_per_s"}


def state_after(*events: Event) -> LiveState:
    return reduce(after, events, LiveState())


def lines(state: LiveState, width: int = 80, age_s: float = 0.0, *, is_coloured: bool = False) -> list[str]:
    """The text on a terminal; the part of a bar that is not done is drawn only with colours."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False, no_color=not is_coloured,
        color_system="standard" if is_coloured else None,
    )  # fmt: skip
    console.print(view(state, age_s, width))
    assert isinstance(console.file, io.StringIO)
    return [Text.from_ansi(line).plain.rstrip() for line in console.file.getvalue().splitlines()]


def line(state: LiveState, label: str, width: int = 80) -> str:
    [found] = [line for line in lines(state, width) if line.startswith(label)]
    return " ".join(found.removeprefix(label).split())


def whole_run() -> Iterator[Event]:
    """10 epochs of 10 steps of 2 s, and an evaluation of 5 s after each: 250 s."""
    now = 1000.0
    for epoch in range(10):
        for at in range(10 * epoch + 1, 10 * epoch + 11):
            now += 2.0
            yield step(at, time=now, epoch=epoch + 1)
        yield {"event": "evaluating", "time": now + 1, "batch": 1, "batches": 5}
        now += 5.0
        yield {
            "event": "epoch", "time": now, "epoch": epoch + 1, "step": 10 * epoch + 10,
            "train_loss": 0.3, "val_loss": 0.2, "accuracy": 0.9,
        }  # fmt: skip


# --- time left ----------------------------------------------------------------------------------------------


def test_the_time_left_counts_the_evaluations_to_come() -> None:
    state, checked = LiveState(), 0
    for event in whole_run():
        state = after(state, event)
        if event["event"] == "step" and event["epoch"] > 1:
            assert left_s(state) == pytest.approx(1250.0 - event["time"])
            checked += 1
    assert checked == 90
    assert left_s(state) == 0.0


def test_an_evaluation_that_has_ended_is_not_counted_again() -> None:
    *before, ended = list(whole_run())[:12]
    assert left_s(state_after(*before, ended)) == pytest.approx(225.0)


def test_the_time_left_follows_a_lasting_change_of_speed() -> None:
    slower = [step(at, time=1000.0 * at, steps=50) for at in range(1, 21)]
    faster = [step(20 + at, time=20_000.0 + 100 * at, steps=50) for at in range(1, 21)]
    assert left_s(state_after(*slower)) == pytest.approx(30_000.0)
    assert left_s(state_after(*slower, *faster)) == pytest.approx(1000.0, rel=0.05)


def test_the_first_step_gives_a_time_left() -> None:
    assert left_s(state_after(step(10, step_ms=[500.0, 480.0]))) == pytest.approx(45.0)
    assert left_s(state_after(step(10))) is None


def test_the_time_left_of_a_stream_is_unknown() -> None:
    state = state_after(*(step(at, time=float(at), steps=None) for at in (1, 2, 3)))
    assert left_s(state) is None
    assert line(state, "run") == "3 steps time left unknown"


def test_speed_is_measured_again_after_a_restart() -> None:
    first = [step(at, time=float(at)) for at in (1, 2, 3)]
    later = state_after(*first, {"event": "run_started", "time": 9000.0}, step(2, time=9001.0), step(4, time=9003.0))
    assert left_s(later) == pytest.approx(96.0)


def test_the_time_left_decreases_between_two_events() -> None:
    state = state_after(step(10, step_ms=[500.0]))
    assert "30 s left" in lines(state, age_s=15.0)[1]
    assert "0 s left" in lines(state, age_s=99.0)[1]


# --- the epoch ----------------------------------------------------------------------------------------------


def end(epoch: int, at: int) -> Event:
    return {"event": "epoch", "time": 0.0, "epoch": epoch, "step": at, "train_loss": 0.5}


def test_the_first_epoch_has_an_equal_share_of_the_steps() -> None:
    assert epoch_part(state_after(step(7))) == (7, 10)
    assert epoch_part(state_after(step(37, epoch=4))) == (7, 10)  # a resumed run, whose earlier events are not read
    assert epoch_part(state_after(step(7, steps=95))) is None  # `max_steps` has cut the last one short
    assert epoch_part(state_after(step(7, steps=None))) is None


def test_later_epochs_are_as_long_as_the_one_before() -> None:
    assert epoch_part(state_after(step(12, steps=95), end(1, 12), step(15, steps=95, epoch=2))) == (3, 12)
    assert epoch_part(state_after(step(12, steps=None), end(1, 12), step(15, steps=None, epoch=2))) == (3, 12)


def test_an_epoch_that_turns_out_longer_has_no_bar() -> None:
    assert epoch_part(state_after(step(12, steps=None), end(1, 12), step(25, steps=None, epoch=2))) is None


def test_an_evaluation_uses_the_bar_of_its_epoch() -> None:
    state = state_after(step(10), {"event": "evaluating", "time": 0.0, "batch": 2, "batches": 6})
    assert line(state, "epoch 1/10").endswith("2/6 evaluating")
    for later in (end(1, 10), step(10)):  # samples are also measured when no epoch has ended
        assert line(after(state, later), "epoch 1/10").endswith("10/10 steps 2,000 samples/s")


# --- the view -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_view_keeps_its_height_and_its_columns(width: int) -> None:
    state, starts, lengths = LiveState(), set(), set()
    for event in whole_run():
        state = after(state, event)
        shown = lines(state, width)
        assert len(shown) == HEIGHT
        assert max(len(line) for line in shown) <= width
        starts.add(shown[3].index("loss"))
        lengths |= {sum(map(line.count, "━╸╺")) for line in lines(state, width, is_coloured=True)[1:3]}
    assert len(starts) == len(lengths) == 1


def test_all_lines_are_shown() -> None:
    events = list(whole_run())[:15]
    shown = lines(state_after(*events[:-1], {**events[-1], "lr": 0.003, "memory_mb": [300.0, 310.4]}))
    assert [" ".join(line.translate({ord(c): None for c in "━╸╺"}).split()) for line in shown] == [
        "",
        "run 13/100 steps 4 min left",
        "epoch 2/10 3/10 steps 2,000 samples/s",
        "training loss 0.2500 lr 0.003 310 MB a rank",
        "evaluation val_loss 0.2000 accuracy 0.9000",
        "slowest -",
    ]


def test_the_loss_is_that_of_the_last_step_event_and_everything_else_that_of_the_last_pace_event() -> None:
    events = [recorded(8, lr=0.5), recorded(10, lr=0.25), pace(13, step_ms=[500.0], memory_mb=[300.0])]
    state = state_after(*events)
    assert line(state, "training") == "loss 0.2500 lr 0.25 300 MB"
    assert "13/100 steps" in line(state, "run")
    assert left_s(state) == pytest.approx(43.5)
    assert line(state_after(events[-1]), "training") == "loss - 300 MB"  # no step has been recorded yet
    assert lines(state_after(recorded(8))) == [""]  # the pace is written with it


def test_further_values_of_a_step_are_shown_after_the_loss() -> None:
    values = {"perplexity": 1.5, "margin": None}
    assert line(state_after(recorded(8, lr=0.5, values=values), pace(8)), "training") == (
        "loss 0.2500 lr 0.5 perplexity 1.5000"
    )
    assert line(state_after(recorded(8, loss=None, values=values), pace(8)), "training") == "perplexity 1.5000"


def test_the_length_of_a_bar_is_the_share_that_is_done() -> None:
    shown = lines(state_after(step(50, epoch=5)), 120)
    drawn = [line.count("━") + line.count("╸") for line in shown[1:3]]
    assert drawn[0] == pytest.approx(drawn[1] / 2, abs=1)  # half of the run, all of the epoch


def test_the_slowest_rank_is_named_with_the_reason() -> None:
    phases = {"data": [1.0, 9.0], "forward": [5.0, 5.0], "reduction": [9.0, 1.0]}
    state = state_after(step(1, step_ms=[15.0, 15.0], phase_ms=phases))
    assert line(state, "slowest") == "rank 1: +8.0 ms (data)"


def test_one_slow_second_does_not_change_the_slowest_rank() -> None:
    even = {"data": [1.0, 1.0], "forward": [8.0, 8.0], "reduction": [1.0, 1.0]}
    late = {"data": [1.0, 4.0], "forward": [8.0, 8.0], "reduction": [4.0, 1.0]}
    state = state_after(*(step(second, time=second, step_ms=[10.0] * 2, phase_ms=even) for second in range(20)))
    state = after(state, step(20, time=20.0, step_ms=[13.0] * 2, phase_ms=late))
    assert line(state, "slowest") == "-"
    for second in range(21, 50):
        state = after(state, step(second, time=second, step_ms=[13.0] * 2, phase_ms=late))
    assert line(state, "slowest") == "rank 1: +2.9 ms (data)"


def test_the_first_steps_of_a_run_are_replaced_by_the_next() -> None:
    loading = {"data": [1.0, 900.0], "forward": [9.0, 9.0], "reduction": [899.0, 0.0]}
    even = {"data": [1.0, 1.0], "forward": [8.0, 8.0], "reduction": [1.0, 1.0]}
    state = state_after(step(1, step_ms=[909.0] * 2, phase_ms=loading))
    assert line(state, "slowest") == "rank 1: +899 ms (data)"
    assert line(after(state, step(10, time=0.1, step_ms=[10.0] * 2, phase_ms=even)), "slowest") == "-"


def test_times_of_another_number_of_ranks_are_not_mixed() -> None:
    four, two = {"data": [1.0] * 4}, {"data": [1.0] * 2}
    state = state_after(step(1, step_ms=[9.0] * 4, phase_ms=four), step(2, step_ms=[9.0] * 2, phase_ms=two))
    assert line(state, "slowest") == "-"


def test_metrics_that_do_not_fit_are_left_out() -> None:
    many = {f"metric_{n}": 0.5 for n in range(10)}
    state = state_after(step(10), {**end(1, 10), **many})
    assert line(state, "evaluation", width=60) == "metric_0 0.5000 metric_1 0.5000"


def test_without_validation_the_loss_of_the_epoch_is_shown() -> None:
    assert line(state_after(step(10), end(1, 10)), "evaluation") == "train_loss 0.5000"


def test_steps_that_were_all_skipped_have_no_loss() -> None:
    assert line(state_after(step(10, loss=None)), "training") == "loss -"


def test_nothing_is_shown_before_the_first_event() -> None:
    assert lines(LiveState()) == [""]


@pytest.mark.parametrize("kind", ["run_started", "restarted", "run_stopped"])
def test_nothing_is_shown_after_an_attempt_has_ended(kind: str) -> None:
    assert lines(state_after(step(10), {"event": kind, "time": 1.0})) == [""]


def test_the_users_own_loop_is_one_bar() -> None:
    event = {"event": "progress", "time": 0.0, "phase": "training", "epoch": 3, "batch": 4, "batches": 50}
    assert len(lines(state_after(event))) == 2
    assert line(state_after(event), "epoch 3").endswith("5/50 batches training")
    assert line(state_after({**event, "batches": None}), "epoch 3") == "5 batches training"


def test_an_evaluation_without_training_is_one_bar() -> None:
    state = state_after({"event": "evaluating", "time": 0.0, "batch": 3, "batches": 12})
    assert len(lines(state)) == 2
    assert line(state, "evaluating").endswith("3/12 batches")


# --- texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"), (0.0, "0.0000"), (-12.25, "-12.2500"), (0.00012345, "1.23e-04"), (1234567.0, "1.23e+06"),
        (math.nan, "nan"), (math.inf, "inf"), (None, "-"),
    ],
)  # fmt: skip
def test_numbers_have_a_useful_number_of_digits(value: float | None, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s left"), (89.4, "89 s left"), (89.6, "1 min left"), (3600, "60 min left"),
        (2 * 3600 + 300, "2 h 05 min left"), (100 * 3600, "4 d 4 h left"), (None, "time left unknown"),
    ],
)  # fmt: skip
def test_the_time_left_has_one_or_two_units(seconds: float | None, text: str) -> None:
    assert left_text(seconds) == text
