"""The record of losses: what is told of steps does not depend on when the host learns of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.data.loader import Lane, Turn
from paceline.guard import Past
from paceline.loop import LAG, Fit, Log, LossRecord, Plan
from paceline.world import World

HERE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")
PLAN = Plan(total_steps=40, epochs=2, log_every_steps=5, check_replicas_every=100, log_digests=False, best=None)
STEPS, LANES = 12, 3


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
        return [tensor, torch.cat([10 * tensor[:, :-1], tensor[:, -1:]], dim=1)]


def make(world: World = HERE) -> tuple[LossRecord, Fit, Listener]:
    fit, listener = Fit(), Listener()
    return LossRecord(world, fit, PLAN, listener, listener.review), fit, listener  # type: ignore[arg-type]


def turn(step: int) -> Turn:
    lanes = [Lane(step, lane, 2, 2 * LANES, [step, lane]) for lane in range(LANES)]
    return Turn(step, 0, lanes, ends_epoch=False, ends_run=False)


def row(step: int, *, is_skipped: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    losses = torch.rand(LANES, dtype=torch.float64, generator=generator) * 10 ** (step % 7)
    if is_skipped:
        losses[1] = torch.nan
    pairs = [number for loss in losses.tolist() for number in (loss, 2.0)]
    return torch.tensor([*pairs, float(is_skipped)], dtype=torch.float64)  # whose sums depend on their order


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
            total += row(step)[:-1].view(-1, 2)[:, 0].double().sum().item()
    assert fit.sums.epoch == fit.sums.window == total
    assert fit.sums.epoch_count == 2 * LANES * (STEPS - len(skipped))
    assert record.epoch_mean() == total / fit.sums.epoch_count


def test_rows_of_other_ranks_are_in_the_sums_and_in_the_order_of_the_lanes() -> None:
    record, fit, listener = make(Pair(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo"))
    record.add(turn(0), torch.tensor([1.0, 2, 3, 4, 5, 6, 0]))
    record.collect()
    assert (fit.sums.epoch, fit.sums.epoch_count) == (9 + 90, 12 + 120)
    [past] = listener.reviewed
    assert past.totals == [[1, 2], [3, 4], [5, 6], [10, 20], [30, 40], [50, 60]]


def test_rows_of_several_formats_go_together() -> None:
    """A loss in float64, and the zeros of a step that the host has skipped."""
    record, fit, _ = make()
    record.add(turn(0), row(0))
    record.add(turn(1), torch.zeros(2 * LANES + 1))
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
        expected = row(past.step, is_skipped=past.is_skipped)[:-1].double().view(-1, 2).tolist()
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
    losses = [row(step)[:-1].double().view(-1, 2).sum(0) for step in range(3)]
    assert event["loss"] == pytest.approx(((losses[0] + losses[1])[0] / 12).item())
    assert fit.sums.window == 0.0
    record.send(Log(3, 1, 0.125))
    record.settle()
    assert listener.events[1]["loss"] == pytest.approx((losses[2][0] / 6).item())
    assert (listener.events[1]["epoch"], listener.events[1]["lr"]) == (1, 0.125)
    assert fit.seconds > 0


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


def test_an_epoch_begins_at_nothing_and_leaves_the_window() -> None:
    record, fit, _ = make()
    record.add(turn(0), row(0))
    record.collect()
    record.restart_epoch()
    assert record.epoch_mean() is None
    assert fit.sums.window_count == 2 * LANES
