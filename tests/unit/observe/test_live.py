"""telemetry/live.py: what is known of a run, and the lines that show it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from paceline.observe.live import Event, Facts, after, epoch_part, left_s, left_text, number_text, view

HEIGHT = 6  # a line that sets the view apart, two bars, three rows


def step(at: int, *, time: float = 0.0, steps: int | None = 100, epoch: int = 1, **more: Any) -> Event:
    """A `step` event of a run of 10 epochs, as it was before there were phases."""
    told = {"event": "step", "time": time, "step": at, "steps": steps, "epoch": epoch, "epochs": 10, "loss": 0.25}
    return {**told, "samples_per_s": 2000.0, **more}


def pace(at: int, **more: Any) -> Event:
    """A `pace` event, which has all that is not in a curve."""
    told = {name: value for name, value in step(at, **more).items() if name not in ("loss", "lr")}
    return {**told, "event": "pace"}


def recorded(at: int, **more: Any) -> Event:
    """A `step` event as it is beside `pace` events."""
    return {name: value for name, value in step(at, **more).items() if name != "samples_per_s"}


def known(*events: Event) -> Facts:
    return reduce(after, events, Facts())


def lines(facts: Facts, width: int = 80, age_s: float = 0.0, *, is_coloured: bool = False) -> list[str]:
    """What is read on a terminal; what is left of a bar is drawn only where there are colours."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False, no_color=not is_coloured,
        color_system="standard" if is_coloured else None,
    )  # fmt: skip
    console.print(view(facts, age_s, width))
    assert isinstance(console.file, io.StringIO)
    return [Text.from_ansi(line).plain.rstrip() for line in console.file.getvalue().splitlines()]


def line(facts: Facts, label: str, width: int = 80) -> str:
    [found] = [line for line in lines(facts, width) if line.startswith(label)]
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
    facts, checked = Facts(), 0
    for event in whole_run():
        facts = after(facts, event)
        if event["event"] == "step" and event["epoch"] > 1:
            assert left_s(facts) == pytest.approx(1250.0 - event["time"])
            checked += 1
    assert checked == 90
    assert left_s(facts) == 0.0


def test_an_evaluation_that_has_ended_is_not_to_come() -> None:
    *before, ended = list(whole_run())[:12]
    assert left_s(known(*before, ended)) == pytest.approx(225.0)


def test_a_speed_that_has_changed_for_long_is_believed() -> None:
    slower = [step(at, time=1000.0 * at, steps=50) for at in range(1, 21)]
    faster = [step(20 + at, time=20_000.0 + 100 * at, steps=50) for at in range(1, 21)]
    assert left_s(known(*slower)) == pytest.approx(30_000.0)
    assert left_s(known(*slower, *faster)) == pytest.approx(1000.0, rel=0.05)


def test_the_first_step_already_tells_a_time() -> None:
    assert left_s(known(step(10, step_ms=[500.0, 480.0]))) == pytest.approx(45.0)
    assert left_s(known(step(10))) is None


def test_nobody_knows_when_a_stream_ends() -> None:
    facts = known(*(step(at, time=float(at), steps=None) for at in (1, 2, 3)))
    assert left_s(facts) is None
    assert line(facts, "run") == "3 steps time left unknown"


def test_another_life_is_timed_anew() -> None:
    first = [step(at, time=float(at)) for at in (1, 2, 3)]
    later = known(*first, {"event": "run_started", "time": 9000.0}, step(2, time=9001.0), step(4, time=9003.0))
    assert left_s(later) == pytest.approx(96.0)


def test_time_goes_on_between_two_events() -> None:
    facts = known(step(10, step_ms=[500.0]))
    assert "30 s left" in lines(facts, age_s=15.0)[1]
    assert "0 s left" in lines(facts, age_s=99.0)[1]


# --- the epoch ----------------------------------------------------------------------------------------------


def end(epoch: int, at: int) -> Event:
    return {"event": "epoch", "time": 0.0, "epoch": epoch, "step": at, "train_loss": 0.5}


def test_an_epoch_is_its_share_of_the_steps_until_one_has_been_seen() -> None:
    assert epoch_part(known(step(7))) == (7, 10)
    assert epoch_part(known(step(37, epoch=4))) == (7, 10)  # a run that went on, and whose past is not read
    assert epoch_part(known(step(7, steps=95))) is None  # `max_steps` has cut the last one short
    assert epoch_part(known(step(7, steps=None))) is None


def test_an_epoch_is_as_long_as_the_one_before() -> None:
    assert epoch_part(known(step(12, steps=95), end(1, 12), step(15, steps=95, epoch=2))) == (3, 12)
    assert epoch_part(known(step(12, steps=None), end(1, 12), step(15, steps=None, epoch=2))) == (3, 12)


def test_an_epoch_that_turns_out_longer_has_no_bar() -> None:
    assert epoch_part(known(step(12, steps=None), end(1, 12), step(25, steps=None, epoch=2))) is None


def test_an_evaluation_has_the_bar_of_its_epoch() -> None:
    facts = known(step(10), {"event": "evaluating", "time": 0.0, "batch": 2, "batches": 6})
    assert line(facts, "epoch 1/10").endswith("2/6 evaluating")
    for later in (end(1, 10), step(10)):  # samples are also measured when no epoch has ended
        assert line(after(facts, later), "epoch 1/10").endswith("10/10 steps 2,000 samples/s")


# --- the view -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_view_keeps_its_height_and_its_place(width: int) -> None:
    facts, starts, lengths = Facts(), set(), set()
    for event in whole_run():
        facts = after(facts, event)
        shown = lines(facts, width)
        assert len(shown) == HEIGHT
        assert max(len(line) for line in shown) <= width
        starts.add(shown[3].index("loss"))
        lengths |= {sum(map(line.count, "━╸╺")) for line in lines(facts, width, is_coloured=True)[1:3]}
    assert len(starts) == len(lengths) == 1


def test_everything_that_is_known_is_shown() -> None:
    events = list(whole_run())[:15]
    shown = lines(known(*events[:-1], {**events[-1], "lr": 0.003, "memory_mb": [300.0, 310.4]}))
    assert [" ".join(line.translate({ord(c): None for c in "━╸╺"}).split()) for line in shown] == [
        "",
        "run 13/100 steps 4 min left",
        "epoch 2/10 3/10 steps 2,000 samples/s",
        "training loss 0.2500 lr 0.003 310 MB a rank",
        "evaluation val_loss 0.2000 accuracy 0.9000",
        "slowest -",
    ]


def test_the_loss_is_that_of_the_last_recorded_step_and_all_else_follows_the_pace() -> None:
    events = [recorded(8, lr=0.5), recorded(10, lr=0.25), pace(13, step_ms=[500.0], memory_mb=[300.0])]
    facts = known(*events)
    assert line(facts, "training") == "loss 0.2500 lr 0.25 300 MB"
    assert "13/100 steps" in line(facts, "run")
    assert left_s(facts) == pytest.approx(43.5)
    assert line(known(events[-1]), "training") == "loss - 300 MB"  # no step has been recorded yet
    assert lines(known(recorded(8))) == [""]  # the pace is written with it


def test_bars_are_as_long_as_what_is_done() -> None:
    shown = lines(known(step(50, epoch=5)), 120)
    drawn = [line.count("━") + line.count("╸") for line in shown[1:3]]
    assert drawn[0] == pytest.approx(drawn[1] / 2, abs=1)  # half of the run, all of the epoch


def test_the_slowest_rank_is_named_with_the_reason() -> None:
    phases = {"data": [1.0, 9.0], "forward": [5.0, 5.0], "reduction": [9.0, 1.0]}
    facts = known(step(1, step_ms=[15.0, 15.0], phase_ms=phases))
    assert line(facts, "slowest") == "rank 1: +8.0 ms (data)"


def test_one_late_moment_does_not_change_what_is_shown() -> None:
    even = {"data": [1.0, 1.0], "forward": [8.0, 8.0], "reduction": [1.0, 1.0]}
    late = {"data": [1.0, 4.0], "forward": [8.0, 8.0], "reduction": [4.0, 1.0]}
    facts = known(*(step(second, time=second, step_ms=[10.0] * 2, phase_ms=even) for second in range(20)))
    facts = after(facts, step(20, time=20.0, step_ms=[13.0] * 2, phase_ms=late))
    assert line(facts, "slowest") == "-"
    for second in range(21, 50):
        facts = after(facts, step(second, time=second, step_ms=[13.0] * 2, phase_ms=late))
    assert line(facts, "slowest") == "rank 1: +2.9 ms (data)"


def test_the_first_steps_of_a_run_are_soon_forgotten() -> None:
    loading = {"data": [1.0, 900.0], "forward": [9.0, 9.0], "reduction": [899.0, 0.0]}
    even = {"data": [1.0, 1.0], "forward": [8.0, 8.0], "reduction": [1.0, 1.0]}
    facts = known(step(1, step_ms=[909.0] * 2, phase_ms=loading))
    assert line(facts, "slowest") == "rank 1: +899 ms (data)"
    assert line(after(facts, step(10, time=0.1, step_ms=[10.0] * 2, phase_ms=even)), "slowest") == "-"


def test_other_ranks_after_a_restart_are_not_mixed_with_those_before() -> None:
    four, two = {"data": [1.0] * 4}, {"data": [1.0] * 2}
    facts = known(step(1, step_ms=[9.0] * 4, phase_ms=four), step(2, step_ms=[9.0] * 2, phase_ms=two))
    assert line(facts, "slowest") == "-"


def test_what_does_not_fit_is_left_out_whole() -> None:
    many = {f"metric_{n}": 0.5 for n in range(10)}
    facts = known(step(10), {**end(1, 10), **many})
    assert line(facts, "evaluation", width=60) == "metric_0 0.5000 metric_1 0.5000"


def test_without_validation_the_loss_of_the_epoch_is_shown() -> None:
    assert line(known(step(10), end(1, 10)), "evaluation") == "train_loss 0.5000"


def test_steps_that_were_all_skipped_have_no_loss() -> None:
    assert line(known(step(10, loss=None)), "training") == "loss -"


def test_nothing_known_is_nothing_shown() -> None:
    assert lines(Facts()) == [""]


@pytest.mark.parametrize("kind", ["run_started", "restarted", "run_stopped"])
def test_a_life_that_has_ended_leaves_nothing_to_show(kind: str) -> None:
    assert lines(known(step(10), {"event": kind, "time": 1.0})) == [""]


def test_the_users_own_loop_is_one_bar() -> None:
    event = {"event": "progress", "time": 0.0, "phase": "training", "epoch": 3, "batch": 4, "batches": 50}
    assert len(lines(known(event))) == 2
    assert line(known(event), "epoch 3").endswith("5/50 batches training")
    assert line(known({**event, "batches": None}), "epoch 3") == "5 batches training"


def test_an_evaluation_of_its_own_is_one_bar() -> None:
    facts = known({"event": "evaluating", "time": 0.0, "batch": 3, "batches": 12})
    assert len(lines(facts)) == 2
    assert line(facts, "evaluating").endswith("3/12 batches")


# --- in words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"), (0.0, "0.0000"), (-12.25, "-12.2500"), (0.00012345, "1.23e-04"), (1234567.0, "1.23e+06"),
        (math.nan, "nan"), (math.inf, "inf"), (None, "-"),
    ],
)  # fmt: skip
def test_numbers_have_digits_that_say_something(value: float | None, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s left"), (89.4, "89 s left"), (89.6, "1 min left"), (3600, "60 min left"),
        (2 * 3600 + 300, "2 h 05 min left"), (100 * 3600, "4 d 4 h left"), (None, "time left unknown"),
    ],
)  # fmt: skip
def test_the_time_left_is_told_as_people_speak_of_it(seconds: float | None, text: str) -> None:
    assert left_text(seconds) == text
