"""The log of steps: its events do not depend on when the losses reach the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.data.lanes import Lane, StepInputs
from paceline.engine.clock import PHASES, PhaseClock
from paceline.engine.nonfinite import FinishedStep
from paceline.engine.step import NO_NORM, StepResult
from paceline.observe.bottleneck import StragglerDetector
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.step_log import LAG_STEPS, StepLog, is_recorded, log_interval, record_interval
from paceline.world import World
from support.clocks import FakeClock
from support.worlds import fake_world, world_of

HERE = world_of()
PLAN = LoopPlan(total_steps=40, epochs=2, lanes=1, log_every_steps=5, check_replicas_every=100, log_digests=False)
STEPS, LANES = 12, 3
FACTS = -3 - len(PHASES)


class Listener:
    """Stands for the events and for the guard."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.reviewed: list[FinishedStep] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def review(self, steps: Sequence[FinishedStep]) -> None:
        self.reviewed += steps


def with_tenfold(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of two ranks that hold the same rows; the second's are tenfold."""
    rows, facts = tensor[:FACTS].view(-1, 2 * LANES + 2), tensor[FACTS:]
    return [tensor, torch.cat([torch.cat([10 * rows[:, :-2], rows[:, -2:]], dim=1).flatten(), 3 * facts])]


PAIR = fake_world(size=2, gathered=with_tenfold)


def make(
    world: World = HERE, plan: LoopPlan = PLAN, state: TrainState | None = None
) -> tuple[StepLog, TrainState, Listener]:
    state, listener = state or TrainState(), Listener()
    clock, stragglers = PhaseClock(), StragglerDetector(["here"] * world.size)
    plan = replace(plan, lanes=LANES * world.size)
    record = StepLog(world, state, plan, listener, clock, stragglers, listener.review)  # type: ignore[arg-type]
    return record, state, listener


def step_inputs(step: int, *, ends_epoch: bool = False, is_epoch_cut_short: bool = False) -> StepInputs:
    lanes = [Lane(step, lane, 2, 2 * LANES, [step, lane]) for lane in range(LANES)]
    return StepInputs(
        step, 0, lanes, ends_epoch=ends_epoch, ends_run=is_epoch_cut_short, is_epoch_cut_short=is_epoch_cut_short
    )


def lr_of(step: int) -> float:
    return 0.5 ** (step + 1)


def row(step: int, *, is_skipped: bool = False, norm: float = NO_NORM) -> StepResult:
    generator = torch.Generator().manual_seed(step)
    losses = torch.rand(LANES, dtype=torch.float64, generator=generator) * 10 ** (step % 7)
    if is_skipped:
        losses[1] = torch.nan
    pairs = [number for loss in losses.tolist() for number in (loss, 2.0)]
    return StepResult(
        torch.tensor([*pairs, norm, float(is_skipped)], dtype=torch.float64)
    )  # whose sums depend on their order


def summed(record: StepLog, state: TrainState, sends: Sequence[int], collects: Sequence[int], **skipped: Any) -> str:
    for step in range(STEPS):
        record.add(step_inputs(step), row(step, is_skipped=step in skipped.get("skipped", ())), lr_of(step))
        if step in sends:
            record.send()
        if step in collects:
            record.collect()
    record.collect()
    return repr(state.sums)  # to the last digit


WHENS = [([], []), (range(STEPS), []), ([], range(STEPS)), ([2, 3, 9], [5]), ([7], [0, 8]), ([11], [11])]


# --- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [(), (3, 4, 11)])
def test_sums_do_not_depend_on_when_rows_are_sent_or_collected(skipped: tuple[int, ...]) -> None:
    results = set()
    for sends, collects in WHENS:
        record, state, _ = make(plan=replace(PLAN, log_every_steps=100))
        results.add(summed(record, state, sends, collects, skipped=skipped))
    assert len(results) == 1
    total = 0.0
    for step in range(STEPS):
        if step not in skipped:
            total += row(step).lane_losses[:, 0].double().sum().item()
    assert state.sums.epoch == state.sums.window == total
    assert state.sums.epoch_count == 2 * LANES * (STEPS - len(skipped))
    assert record.epoch_means()["train_loss"] == total / state.sums.epoch_count


def test_rows_of_other_ranks_are_in_the_sums_and_in_the_order_of_the_lanes() -> None:
    record, state, listener = make(PAIR)
    record.add(step_inputs(0), StepResult(torch.tensor([1.0, 2, 3, 4, 5, 6, NO_NORM, 0])), lr_of(0))
    record.collect()
    assert (state.sums.epoch, state.sums.epoch_count) == (9 + 90, 12 + 120)
    [past] = listener.reviewed
    assert past.totals == [[1, 2], [3, 4], [5, 6], [10, 20], [30, 40], [50, 60]]


def test_rows_of_several_formats_go_together() -> None:
    """A loss in float64, and the zeros of a step that the host has skipped."""
    record, state, _ = make()
    record.add(step_inputs(0), row(0), lr_of(0))
    record.add(step_inputs(1), StepResult(torch.zeros(2 * LANES + 2)), lr_of(1))
    record.collect()
    assert state.sums.epoch_count == 2 * LANES


def test_further_values_are_means_over_all_lanes_in_events_and_epochs() -> None:
    """Each weighted by its own count; a step that has not computed a value leaves it out."""
    record, state, listener = make(fake_world(size=2), replace(PLAN, log_every_steps=1))
    losses, values = [1.0, 2, 3, 2, 5, 2], [4.0, 1, 0, 0, 6, 3]  # the sum and the count of each lane
    record.add(step_inputs(0), StepResult(torch.tensor([*losses, *values, NO_NORM, 0]), ("error",)), lr_of(0))
    record.add(step_inputs(1), StepResult(torch.tensor([*losses, NO_NORM, 0])), lr_of(1))
    record.collect()
    assert [event["values"] for event in listener.of("step")] == [{"error": 2.5}, {"error": None}]
    assert [event["loss"] for event in listener.of("step")] == [1.5, 1.5]
    assert record.epoch_means() == {"train_loss": 1.5, "train_error": 2.5}
    assert record.last == {"loss": 1.5, "grad_norm": None, "lr": lr_of(1)}
    assert TrainState.from_dict(asdict(state)) == state
    record.restart_epoch()
    assert record.epoch_means() == {"train_loss": None, "train_error": None}


def test_further_values_of_a_skipped_step_do_not_count() -> None:
    record, _, listener = make(plan=replace(PLAN, log_every_steps=1))
    bad = [torch.nan, 2.0, 3.0, 2.0, 5.0, 2.0]
    record.add(step_inputs(0), StepResult(torch.tensor([*bad, *bad, NO_NORM, 1]), ("error",)), lr_of(0))
    record.collect()
    assert listener.of("step")[0]["values"] == {"error": None}
    assert record.last["error"] is None


# --- skipped steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sends", "collects"), WHENS)
def test_every_step_is_reviewed_once_in_order_with_its_lanes(sends: Sequence[int], collects: Sequence[int]) -> None:
    record, state, listener = make()
    summed(record, state, sends, collects, skipped=(1, 6, 7))
    assert [past.step for past in listener.reviewed] == list(range(STEPS))
    assert [past.step for past in listener.reviewed if past.is_skipped] == [1, 6, 7]
    for past in listener.reviewed:
        assert past.lanes == [(lane, [past.step, lane]) for lane in range(LANES)]
        expected = row(past.step, is_skipped=past.is_skipped).lane_losses.double().tolist()
        assert str(past.totals) == str(expected)


def test_there_is_no_mean_where_every_step_was_skipped() -> None:
    record, state, listener = make(plan=replace(PLAN, log_every_steps=1))
    assert record.epoch_means() == {"train_loss": None}
    record.add(step_inputs(0), row(0, is_skipped=True), lr_of(0))
    record.send(is_log_point=True)
    record.settle()
    assert record.epoch_means() == {"train_loss": None}
    assert listener.of("step")[0]["loss"] is None
    assert (state.sums.window, state.sums.epoch) == (0.0, 0.0)


# --- which steps are recorded ---------------------------------------------------------------------------------------


def recorded(steps: int, every_steps: int | None = None, epoch: int = 10**9) -> list[int]:
    turns = (step_inputs(step, ends_epoch=(step + 1) % epoch == 0) for step in range(steps))
    return [each.step + 1 for each in turns if is_recorded(each, every_steps)]


def test_the_first_steps_are_all_recorded_and_later_ones_ever_more_rarely() -> None:
    steps = recorded(10_000)
    assert steps[:202] == [*range(1, 201), 202, 204]
    assert steps[-3:] == [9_900, 9_950, 10_000]
    assert len(steps) == 740
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps == sorted(gaps)


@pytest.mark.parametrize("step", [1, 200, 201, 10**6, 10**9, 10**12])
def test_a_recorded_step_stands_for_a_small_part_of_the_run(step: int) -> None:
    assert max(1, step / 200) <= record_interval(step) <= max(1, step / 200 * 2.5)


def test_the_config_may_choose_the_interval() -> None:
    assert recorded(23, every_steps=10) == [10, 20]


def test_an_epoch_ends_with_a_record_unless_the_run_only_is_epoch_cut_short_there() -> None:
    """So a run that is made longer has the records of one that was as long from the beginning."""
    assert recorded(23, every_steps=10, epoch=8) == [8, 10, 16, 20]
    assert not is_recorded(step_inputs(12, ends_epoch=True, is_epoch_cut_short=True), 10)
    assert is_recorded(step_inputs(19, ends_epoch=True, is_epoch_cut_short=True), 10)


def records(chance: random.Random | None = None) -> list[dict[str, Any]]:
    """The `step` events of 600 steps; where there is `chance`, it decides on log points, checkpoints and kills."""

    def happens(share: float) -> bool:
        return chance is not None and chance.random() < share

    plan = replace(PLAN, log_every_steps=None)
    record, state, listener = make(plan=plan)
    saved, written = asdict(state), list[dict[str, Any]]()
    while state.step < 600:
        step = state.step
        its_row = row(step, norm=float(step), is_skipped=step % 50 < 3)
        record.add(step_inputs(step, ends_epoch=step % 97 == 96), its_row, lr_of(step))
        state.step += 1
        if happens(0.05):
            record.send(is_log_point=happens(0.5))
        if happens(0.02):
            record.collect()
            saved = asdict(state)
        if happens(0.02):  # a kill: the run resumes from the checkpoint, and later events are removed
            written = [event for event in [*written, *listener.of("step")] if event["step"] <= saved["step"]]
            record, state, listener = make(plan=plan, state=TrainState.from_dict(saved))
    record.collect()
    return [{**event, "time": None} for event in [*written, *listener.of("step")]]


def test_records_do_not_depend_on_log_points_checkpoints_and_restarts() -> None:
    undisturbed = records()
    assert len(undisturbed) > 300
    for seed in range(10):
        assert records(random.Random(seed)) == undisturbed


# --- fields of `step` and `pace` events -----------------------------------------------------------------------------


def test_a_record_that_is_written_later_has_its_own_step(clock: FakeClock) -> None:
    clock.now = 1000.1234
    record, state, listener = make(plan=replace(PLAN, log_every_steps=2))
    for step in range(3):  # the last one is of the next window
        record.add(step_inputs(step), row(step), lr_of(step))
    record.send(is_log_point=True)
    assert listener.events == []
    record.settle()
    [event] = listener.of("step")
    losses = [row(step).lane_losses.double().sum(0) for step in range(3)]
    assert event.pop("loss") == ((losses[0] + losses[1])[0] / 12).item()
    assert event == {
        "event": "step", "time": 1000.123, "step": 2, "steps": 40, "epoch": 1, "epochs": 2, "lr": 0.25,
        "grad_norm": None,
    }  # fmt: skip
    [pace] = listener.of("pace")
    assert [pace[name] for name in ("step", "steps", "epoch", "epochs")] == [3, 40, 1, 2]
    assert state.sums.window == losses[2][0].item()
    assert state.seconds > 0


@pytest.mark.parametrize(
    ("norm", "is_skipped", "warning"),
    [(2.5, False, 2.5), (0.0, False, 0.0), (NO_NORM, False, None), (float("nan"), True, None), (7.0, True, None)],
)
def test_the_norm_of_the_gradients_is_that_of_the_recorded_step(
    norm: float, is_skipped: bool, warning: float | None
) -> None:
    record, _, listener = make(plan=replace(PLAN, log_every_steps=2))
    record.add(step_inputs(0), row(0, norm=99.0), lr_of(0))
    record.add(step_inputs(1), row(1, norm=norm, is_skipped=is_skipped), lr_of(1))
    record.add(step_inputs(2), row(2, norm=98.0), lr_of(2))
    record.collect()
    [event] = listener.events
    assert event["grad_norm"] == warning


def test_each_rank_reports_its_time_for_a_step_and_its_memory(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time from log point to log point, whatever is collected between them; an evaluation is left out."""
    monkeypatch.setattr("paceline.system.memory.used_on", lambda device: 5_000_000)
    record, _, listener = make(PAIR)
    for step in range(9):
        clock.advance(0.5 if step < 3 else 0.25)
        record.add(step_inputs(step), row(step), lr_of(step))
        if step == 1:
            record.collect()
        if step in (2, 4, 8):
            record.send(is_log_point=True)  # its event is written later, as on a GPU
        if step == 6:
            clock.advance(60)
            record.restart_clock()
    record.settle()
    paces = listener.of("pace")
    assert [event["step_ms"] for event in paces] == [[500, 1500], [250, 750], [250, 750]]
    assert [event["phase_ms"]["other"] for event in paces] == [[500, 1500], [250, 750], [250, 750]]
    assert [event["memory_mb"] for event in paces] == [[5, 15]] * 3


def test_the_end_of_an_epoch_after_a_log_point_that_has_not_arrived_has_the_pace_of_both(clock: FakeClock) -> None:
    """On a GPU a log point is read later; the window between it and the end of the epoch would have no samples."""
    record, _, listener = make()
    for step in range(5):
        clock.advance(0.5)
        record.add(step_inputs(step, ends_epoch=step == 4), row(step), lr_of(step))
        if step == 3:
            record.send(is_log_point=True)
    record.advance(5, ends_epoch=True)
    [pace] = listener.of("pace")
    assert (pace["step"], pace["samples_per_s"]) == (5, 5 * 2 * LANES / 2.5)


@pytest.mark.parametrize(
    ("step_s", "elapsed_s", "cost_s", "steps"),
    [
        (3.0, 3.0, 0.0, 1),  # a slow step is logged at once
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
def test_log_points_that_the_config_does_not_set_follow_the_time(
    step_s: float, elapsed_s: float, cost_s: float, steps: int
) -> None:
    assert log_interval(step_s, elapsed_s, cost_s) == steps


def test_all_ranks_choose_the_same_log_points(clock: FakeClock) -> None:
    """By the slowest rank's time, which all ranks know."""
    record, _, listener = make(PAIR, replace(PLAN, log_every_steps=None))
    for step in range(1, 120):
        clock.advance(0.001)  # three times as much on the other rank
        record.add(step_inputs(step - 1), row(step - 1), lr_of(step - 1))
        if record.is_due(step):
            record.send(is_log_point=True)
            record.settle()
    assert [event["step"] for event in listener.of("pace")] == [1, 50, 100]


def test_a_checkpoint_between_log_points_closes_no_window() -> None:
    record, state, listener = make()
    for step in range(4):
        record.add(step_inputs(step), row(step), lr_of(step))
        record.collect()
    assert listener.events == []
    assert state.sums.window_count == 4 * 2 * LANES
    record.add(step_inputs(4), row(4), lr_of(4))
    record.send(is_log_point=True)
    record.settle()
    assert [event["event"] for event in listener.events] == ["step", "pace"]
    assert state.sums.window_count == 0
    assert state.sums.epoch_count == 5 * 2 * LANES


def test_only_a_log_point_is_overdue_and_only_after_some_steps() -> None:
    record, _, listener = make()
    record.add(step_inputs(0), row(0), lr_of(0))
    assert not record.is_overdue(100)
    record.send()
    assert not record.is_overdue(100)  # it is not a log point
    record.add(step_inputs(1), row(1), lr_of(1))
    record.send(is_log_point=True)
    assert [record.is_overdue(step) for step in range(2, 3 + LAG_STEPS)] == [False] * LAG_STEPS + [True]
    record.settle()
    assert not record.is_overdue(100)
    record.settle()
    record.collect()
    assert len(listener.events) == 1


def test_a_gpu_has_enough_work_while_a_log_point_is_copied() -> None:
    record, _, _ = make(plan=replace(PLAN, log_every_steps=1000))
    record.add(step_inputs(999), row(999), lr_of(999))
    record.send(is_log_point=True)
    assert [record.is_overdue(step) for step in (1002, 1049, 1050)] == [False, False, True]


def test_an_epoch_begins_at_nothing_and_leaves_the_window() -> None:
    record, state, _ = make()
    record.add(step_inputs(0), row(0), lr_of(0))
    record.collect()
    record.restart_epoch()
    assert record.epoch_means() == {"train_loss": None}
    assert state.sums.window_count == 2 * LANES


def test_a_checkpoint_that_counts_epochs_from_0_is_read_with_epochs_from_1() -> None:
    rows = [{"epoch": 0, "step": 5, "train_loss": 0.5}, {"epoch": 1, "step": 10, "train_loss": 0.25}]
    state = TrainState.from_dict({**asdict(TrainState()), "history": rows})
    assert [row["epoch"] for row in state.history] == [1, 2]
    assert TrainState.from_dict(asdict(state)) == state
