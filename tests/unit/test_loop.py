"""The record of losses: what is told of steps does not depend on when the host learns of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.clock import PHASES, Clock
from paceline.data.loader import Lane, Turn
from paceline.guard import Past
from paceline.loop import LAG, Fit, Log, LossRecord, Plan, log_interval
from paceline.step import NO_NORM, NORM
from paceline.telemetry.stragglers import Stragglers
from paceline.world import World

HERE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")
PLAN = Plan(total_steps=40, epochs=2, log_every_steps=5, check_replicas_every=100, log_digests=False, best=None)
STEPS, LANES = 12, 3
FACTS = -3 - len(PHASES)


class Listener:
    """Stands for the events and for the guard."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.reviewed: list[Past] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def review(self, steps: Sequence[Past]) -> None:
        self.reviewed += steps


class Pair(World):
    """Two ranks that hold the same rows, without a process group; the second's are tenfold."""

    def gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows, facts = tensor[:FACTS].view(-1, 2 * LANES + 2), tensor[FACTS:]
        return [tensor, torch.cat([torch.cat([10 * rows[:, :NORM], rows[:, NORM:]], dim=1).flatten(), 3 * facts])]


def make(world: World = HERE, plan: Plan = PLAN) -> tuple[LossRecord, Fit, Listener]:
    fit, listener = Fit(), Listener()
    clock, stragglers = Clock(), Stragglers(["here"] * world.size)
    record = LossRecord(world, fit, plan, listener, clock, stragglers, listener.review)  # type: ignore[arg-type]
    return record, fit, listener


def turn(step: int) -> Turn:
    lanes = [Lane(step, lane, 2, 2 * LANES, [step, lane]) for lane in range(LANES)]
    return Turn(step, 0, lanes, ends_epoch=False, ends_run=False)


def row(step: int, *, is_skipped: bool = False, norm: float = NO_NORM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    losses = torch.rand(LANES, dtype=torch.float64, generator=generator) * 10 ** (step % 7)
    if is_skipped:
        losses[1] = torch.nan
    pairs = [number for loss in losses.tolist() for number in (loss, 2.0)]
    return torch.tensor([*pairs, norm, float(is_skipped)], dtype=torch.float64)  # whose sums depend on their order


def summed(record: LossRecord, fit: Fit, sends: Sequence[int], collects: Sequence[int], **skipped: Any) -> str:
    for step in range(STEPS):
        record.add(turn(step), row(step, is_skipped=step in skipped.get("skipped", ())))
        if step in sends:
            record.send()
        if step in collects:
            record.collect()
    record.collect()
    return repr(fit.sums)  # to the last digit


WHENS = [([], []), (range(STEPS), []), ([], range(STEPS)), ([2, 3, 9], [5]), ([7], [0, 8]), ([11], [11])]


# --- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [(), (3, 4, 11)])
def test_sums_do_not_depend_on_when_rows_are_sent_or_collected(skipped: tuple[int, ...]) -> None:
    results = set()
    for sends, collects in WHENS:
        record, fit, _ = make()
        results.add(summed(record, fit, sends, collects, skipped=skipped))
    assert len(results) == 1
    total = 0.0
    for step in range(STEPS):
        if step not in skipped:
            total += row(step)[:NORM].view(-1, 2)[:, 0].double().sum().item()
    assert fit.sums.epoch == fit.sums.window == total
    assert fit.sums.epoch_count == 2 * LANES * (STEPS - len(skipped))
    assert record.epoch_mean() == total / fit.sums.epoch_count


def test_rows_of_other_ranks_are_in_the_sums_and_in_the_order_of_the_lanes() -> None:
    record, fit, listener = make(Pair(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo"))
    record.add(turn(0), torch.tensor([1.0, 2, 3, 4, 5, 6, NO_NORM, 0]))
    record.collect()
    assert (fit.sums.epoch, fit.sums.epoch_count) == (9 + 90, 12 + 120)
    [past] = listener.reviewed
    assert past.totals == [[1, 2], [3, 4], [5, 6], [10, 20], [30, 40], [50, 60]]


def test_rows_of_several_formats_go_together() -> None:
    """A loss in float64, and the zeros of a step that the host has skipped."""
    record, fit, _ = make()
    record.add(turn(0), row(0))
    record.add(turn(1), torch.zeros(2 * LANES + 2))
    record.collect()
    assert fit.sums.epoch_count == 2 * LANES


# --- skipped steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sends", "collects"), WHENS)
def test_every_step_is_reviewed_once_in_order_with_its_lanes(sends: Sequence[int], collects: Sequence[int]) -> None:
    record, fit, listener = make()
    summed(record, fit, sends, collects, skipped=(1, 6, 7))
    assert [past.step for past in listener.reviewed] == list(range(STEPS))
    assert [past.step for past in listener.reviewed if past.is_skipped] == [1, 6, 7]
    for past in listener.reviewed:
        assert past.lanes == [(lane, [past.step, lane]) for lane in range(LANES)]
        expected = row(past.step, is_skipped=past.is_skipped)[:NORM].double().view(-1, 2).tolist()
        assert str(past.totals) == str(expected)


def test_there_is_no_mean_where_every_step_was_skipped() -> None:
    record, fit, listener = make()
    assert record.epoch_mean() is None
    record.add(turn(0), row(0, is_skipped=True))
    record.send(Log(1, 0, 0.1))
    record.settle()
    assert record.epoch_mean() is None
    assert listener.events[0]["loss"] is None
    assert (fit.sums.window, fit.sums.epoch) == (0.0, 0.0)


# --- what is told ---------------------------------------------------------------------------------------------------


def test_a_log_point_that_is_written_later_tells_its_own_step() -> None:
    record, fit, listener = make()
    record.add(turn(0), row(0))
    record.add(turn(1), row(1))
    record.send(Log(2, 0, 0.25))
    record.add(turn(2), row(2))  # of the next window
    assert listener.events == []
    record.settle()
    [event] = listener.events
    assert {key: event[key] for key in ("event", "step", "steps", "epoch", "epochs", "lr")} == {
        "event": "step", "step": 2, "steps": 40, "epoch": 0, "epochs": 2, "lr": 0.25,
    }  # fmt: skip
    losses = [row(step)[:NORM].double().view(-1, 2).sum(0) for step in range(3)]
    assert event["loss"] == pytest.approx(((losses[0] + losses[1])[0] / 12).item())
    assert fit.sums.window == 0.0
    record.send(Log(3, 1, 0.125))
    record.settle()
    assert listener.events[1]["loss"] == pytest.approx((losses[2][0] / 6).item())
    assert (listener.events[1]["epoch"], listener.events[1]["lr"]) == (1, 0.125)
    assert fit.seconds > 0


@pytest.mark.parametrize(
    ("norm", "is_skipped", "told"),
    [(2.5, False, 2.5), (0.0, False, 0.0), (NO_NORM, False, None), (float("nan"), True, None), (7.0, True, None)],
)
def test_the_norm_of_the_gradients_is_that_of_the_step_told(norm: float, is_skipped: bool, told: float | None) -> None:
    record, _, listener = make()
    record.add(turn(0), row(0, norm=99.0))
    record.add(turn(1), row(1, norm=norm, is_skipped=is_skipped))
    record.send(Log(2, 0, 0.25))
    record.add(turn(2), row(2, norm=98.0))
    record.settle()
    assert listener.events[0]["grad_norm"] == told


def test_each_rank_tells_its_time_for_a_step_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time from log point to log point, whatever is collected between them; an evaluation is left out."""
    clock = [100.0]
    monkeypatch.setattr("paceline.loop.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("paceline.clock.perf_counter", lambda: clock[0])
    monkeypatch.setattr("paceline.memory.used_on", lambda device: 5_000_000)
    record, _, listener = make(Pair(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo"))
    for step in range(9):
        clock[0] += 0.5 if step < 3 else 0.25
        record.add(turn(step), row(step))
        if step == 1:
            record.collect()
        if step in (2, 4, 8):
            record.send(Log(step + 1, 0, 0.1))  # told later, as on a GPU
        if step == 6:
            clock[0] += 60
            record.restart_clock()
    record.settle()
    assert [event["step_ms"] for event in listener.events] == [[500, 1500], [250, 750], [250, 750]]
    assert [event["phase_ms"]["other"] for event in listener.events] == [[500, 1500], [250, 750], [250, 750]]
    assert [event["memory_mb"] for event in listener.events] == [[5, 15]] * 3


@pytest.mark.parametrize(
    ("step_s", "elapsed_s", "cost_s", "steps"),
    [
        (3.0, 3.0, 0.0, 1),  # a step that takes long is told at once
        (0.12, 0.1, 0.0, 1),
        (0.001, 0.0, 0.0, 100),
        (0.0001, 0.0, 0.0, 1000),
        (0.001, 0.0, 0.002, 500),  # the dearer it is, the rarer
        (0.001, 0.0, 1.0, 1000),
        (0.001, 10.0, 0.0, 200),  # the longer the run, the rarer
        (0.001, 3600.0, 0.0, 1000),
        (0.3, 3600.0, 0.0, 5),
        (0.0, 3600.0, 0.0, 1_000_000),  # a clock that stands still
    ],
)
def test_log_points_that_nobody_has_asked_for_follow_the_time(
    step_s: float, elapsed_s: float, cost_s: float, steps: int
) -> None:
    assert log_interval(step_s, elapsed_s, cost_s) == steps


def test_all_ranks_choose_the_same_log_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the slowest rank's time, which all of them have been told."""
    clock = [100.0]
    monkeypatch.setattr("paceline.clock.perf_counter", lambda: clock[0])
    monkeypatch.setattr("paceline.loop.time.perf_counter", lambda: clock[0])
    pair = Pair(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo")
    record, _, listener = make(pair, replace(PLAN, log_every_steps=None))
    for step in range(1, 120):
        clock[0] += 0.001  # three times as much on the other rank
        record.add(turn(step - 1), row(step - 1))
        if record.is_due(step):
            record.send(Log(step, 0, 0.1))
            record.settle()
    assert [event["step"] for event in listener.events] == [1, 50, 100]


def test_a_checkpoint_between_log_points_closes_no_window() -> None:
    record, fit, listener = make()
    for step in range(4):
        record.add(turn(step), row(step))
        record.collect()
    assert listener.events == []
    assert fit.sums.window_count == 4 * 2 * LANES
    record.add(turn(4), row(4))
    record.send(Log(5, 0, 0.1))
    record.settle()
    assert len(listener.events) == 1
    assert fit.sums.window_count == 0
    assert fit.sums.epoch_count == 5 * 2 * LANES


def test_only_a_log_point_is_overdue_and_only_after_some_steps() -> None:
    record, _, listener = make()
    record.add(turn(0), row(0))
    assert not record.is_overdue(100)
    record.send()
    assert not record.is_overdue(100)  # nobody waits for these
    record.add(turn(1), row(1))
    record.send(Log(2, 0, 0.1))
    assert [record.is_overdue(step) for step in range(2, 3 + LAG)] == [False] * LAG + [True]
    record.settle()
    assert not record.is_overdue(100)
    record.settle()
    record.collect()
    assert len(listener.events) == 1


def test_a_gpu_has_enough_to_do_while_a_log_point_is_told() -> None:
    record, _, _ = make(plan=replace(PLAN, log_every_steps=1000))
    record.add(turn(999), row(999))
    record.send(Log(1000, 0, 0.1))
    assert [record.is_overdue(step) for step in (1002, 1049, 1050)] == [False, False, True]


def test_an_epoch_begins_at_nothing_and_leaves_the_window() -> None:
    record, fit, _ = make()
    record.add(turn(0), row(0))
    record.collect()
    record.restart_epoch()
    assert record.epoch_mean() is None
    assert fit.sums.window_count == 2 * LANES
