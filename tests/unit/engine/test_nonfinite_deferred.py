"""Steps that are not finite where the device leaves them out by itself, and the host learns of it later.

A fused optimizer honours `found_inf` on a CPU, too; there is no other difference to a GPU here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import build
from paceline.data.feed import Feed
from paceline.data.lanes import Lane, StepInputs
from paceline.engine.digest import sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.forward_state import ForwardState
from paceline.engine.nonfinite import FinishedStep, Guard, nonfinite_flag
from paceline.engine.replica import PlainModel
from paceline.engine.schedule import LearningRates
from paceline.engine.step import NO_NORM, Stepper, StepResult
from paceline.errors import NotFinite
from support.models import normed
from support.worlds import world_of

HERE = world_of()
BATCH = 4

Batch = tuple[torch.Tensor, torch.Tensor]


class Counting(nn.Module):
    """Buffers of several kinds, which every forward pass spoils, in place or by putting another in their place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = normed(width=8)
        self.register_buffer("most", torch.tensor([-0.0, 1e30, 2.0]))
        self.register_buffer("calls", torch.tensor(2**40))
        self.register_buffer("was_odd", torch.tensor([False, True]))
        self.register_buffer("brief", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("precise", torch.ones(2, 3, dtype=torch.float64).t())
        self.register_buffer("empty", torch.zeros(0))

    @torch.no_grad()
    def _spoil(self, x: torch.Tensor) -> None:
        self.most = self.most - x.amax(0)
        self.calls += 1
        self.was_odd.logical_not_()
        self.brief.mul_(x.mean())
        self.wave.mul_(x.sum())
        self.precise.add_(x.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._spoil(x)
        return self.net(x)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x[:1, 0]])
        return self.net(x)


class Explode(torch.autograd.Function):
    """Passes numbers on; its gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.inf)


def batch(seed: int, poison: float | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(BATCH, 3, generator=generator), torch.randint(0, 2, (BATCH,), generator=generator)
    if poison is not None:
        x[1, 1] = poison
    return x, y


class Renumbered(Feed):
    def original_indices(self, indices: Any) -> list[int]:
        return [1000 + index for index in indices]


class Run:
    """A Stepper without processes; `is_deferred`: whether the device decides."""

    def __init__(
        self, patch: pytest.MonkeyPatch, model: nn.Module | None = None, *, is_deferred: bool = True, lanes: int = 1,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, loss_fn: Any = nn.functional.cross_entropy,
        **keys: Any,
    ) -> None:  # fmt: skip
        patch.setattr("paceline.engine.phase.can_skip", lambda *arguments: is_deferred)
        config = build({"model_fn": Counting, "dataset_fn": list, "loss_fn": loss_fn, "lanes": lanes, **keys})
        self.model, self.warned = model if model is not None else Counting(), list[str]()
        optimizer = make(self.model.parameters(), lr=0.01, fused=True)
        self.stepper = Stepper(
            PlainModel(self.model), optimizer, config, Renumbered([], config, HERE),
            rates=LearningRates(optimizer, lambda step: 1 / (1 + step)), world=HERE,
            warn=self.warned.append,
        )  # fmt: skip
        guard = self.stepper.guard
        assert guard is not None
        assert guard.is_deferred == is_deferred
        self.guard = guard

    def take(self, step: int, *batches: Batch) -> StepResult:
        taken = [
            Lane(step, lane, BATCH, BATCH * len(batches), list(range(lane * BATCH, (lane + 1) * BATCH)), data)
            for lane, data in enumerate(batches)
        ]
        return self.stepper.take(StepInputs(step, 0, taken, ends_epoch=False, ends_run=False))

    def state(self) -> dict[str, Any]:
        """All that a step may change, to the last bit."""
        averages = self.stepper.ema.averages() if self.stepper.ema is not None else {}
        kept = {**self.model.state_dict(), **{f"average {name}": value for name, value in averages.items()}}
        bits = {name: (tensor.shape, _bytes(tensor)) for name, tensor in kept.items()}
        return {**bits, "optimizer": sha256_of_optimizer(self.stepper.optimizer)}


def _bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


# --- a skipped step changes nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("lanes", [1, 3])
def test_weights_optimizer_average_and_buffers_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, poison: float, lanes: int
) -> None:
    run = Run(monkeypatch, lanes=lanes, ema=0.9, clip_norm=0.5)
    good = run.take(0, *(batch(seed) for seed in range(lanes)))
    assert good.is_skipped == 0
    before = run.state()
    row = run.take(1, *(batch(seed, poison if seed == lanes - 1 else None) for seed in range(lanes)))
    assert run.state() == before
    assert row.is_skipped == 1
    assert row.lane_losses[:-1].isfinite().all()  # and the other lanes' losses are unchanged
    assert run.take(2, *(batch(seed) for seed in range(lanes))).is_skipped == 0
    assert all(run.state()[name] != before[name] for name in before if not name.endswith("empty"))
    assert run.warned == []  # the host has not read it yet


@pytest.mark.parametrize("is_deferred", [True, False])
def test_the_row_holds_the_norm_that_the_gradients_had_before_clipping(
    monkeypatch: pytest.MonkeyPatch, is_deferred: bool
) -> None:
    clipped, free = (Run(monkeypatch, is_deferred=is_deferred, **keys) for keys in ({"clip_norm": 1e-3}, {}))
    row = clipped.take(0, batch(0))
    assert free.take(0, batch(0)).grad_norm == NO_NORM
    gradients = [parameter.grad for parameter in free.stepper.parameters if parameter.grad is not None]
    assert row.grad_norm == torch.nn.utils.get_total_norm(gradients)
    assert row.grad_norm > 1e-3


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_the_very_first_step_may_be_bad(monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    run, whole = Run(monkeypatch, ema=0.9), Run(monkeypatch, ema=0.9)
    before = {name: value for name, value in run.state().items() if name != "optimizer"}
    run.take(0, batch(0, poison))
    assert {name: value for name, value in run.state().items() if name != "optimizer"} == before
    for one in (run, whole):
        one.take(1, batch(1))
    assert run.state() == whole.state()


def test_infinite_gradients_of_a_finite_loss_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, ema=0.9, loss_fn=lambda output, target: Explode.apply(output).square().mean())
    before = {name: value for name, value in run.state().items() if name != "optimizer"}
    row = run.take(0, batch(0))
    assert row.is_skipped == 1
    assert row.row.isfinite().all()
    assert {name: value for name, value in run.state().items() if name != "optimizer"} == before


def test_a_bad_loss_counts_even_where_no_gradient_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, loss_fn=lambda output, target: (output[:, 0] + torch.nan).clamp(-9, 9).mean())
    assert run.take(0, batch(0)).is_skipped == 1


class Twice(nn.Module):
    """Has one buffer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = nn.Linear(3, 2), nn.Module()
        self.register_buffer("seen", torch.zeros(1))
        self.other.register_buffer("seen", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 3
        return self.net(x)


def test_a_buffer_in_two_places_is_restored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Twice())
    for step, poison in enumerate([None, None, torch.nan]):
        run.take(step, batch(step, poison))
    assert run.model.seen.tolist() == [6]


def test_buffers_that_change_their_shape_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Growing())
    run.take(0, batch(0))
    before = run.state()
    assert len(run.model.seen) == 2
    assert run.take(1, batch(1, torch.inf)).is_skipped == 1
    assert run.state() == before
    run.take(2, batch(2))
    assert len(run.model.seen) == 3


# --- a good step is the step that the host would have let through ---------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("lanes", [1, 2])
def test_good_steps_have_the_bits_of_those_that_the_host_has_checked(
    monkeypatch: pytest.MonkeyPatch, make: Any, lanes: int
) -> None:
    """A bad step in between, too: it leaves nothing behind on either side."""
    deferred = Run(monkeypatch, lanes=lanes, make=make, clip_norm=0.5)
    checked = Run(monkeypatch, lanes=lanes, make=make, clip_norm=0.5, is_deferred=False)
    for step, poison in enumerate([None, None, torch.nan, None]):
        rows = [
            run.take(step, *(batch(9 * step + lane, poison) for lane in range(lanes))).row
            for run in (deferred, checked)
        ]
        if poison is None:
            assert torch.equal(*rows)
        assert deferred.state() == checked.state()


def test_averages_differ_from_those_of_the_host_in_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lerp there; a difference, a product and a sum here."""
    deferred = Run(monkeypatch, ema=0.9)
    checked = Run(monkeypatch, ema=0.9, is_deferred=False)
    for step in range(5):
        for run in (deferred, checked):
            run.take(step, batch(step))
    ours, theirs = (run.stepper.ema.averages() for run in (deferred, checked))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_an_average_takes_a_step_in_or_leaves_it_out() -> None:
    layer = nn.Linear(2, 2, bias=False)
    ema = Ema(layer, 0.75)
    start = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)
    ema.update(torch.tensor(1.0))
    assert torch.equal(ema.averages()["weight"], start)
    ema.update(torch.tensor(0.0))
    torch.testing.assert_close(ema.averages()["weight"], start + 0.25)


# --- what is found and undone ---------------------------------------------------------------------------------------


def test_what_is_not_finite_is_found_on_the_device() -> None:
    good = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)]
    assert nonfinite_flag(good).tolist() == 0.0
    assert nonfinite_flag([*good, torch.tensor([1, torch.nan], dtype=torch.float64)]).tolist() == 1.0
    assert nonfinite_flag([torch.tensor(-torch.inf), *good]).tolist() == 1.0
    assert nonfinite_flag([]).tolist() == 0.0


@pytest.mark.parametrize("is_bad", [0.0, 1.0])
def test_buffers_are_given_back_only_where_the_step_is_bad(monkeypatch: pytest.MonkeyPatch, is_bad: float) -> None:
    run = Run(monkeypatch)
    before = run.state()
    run.guard.begin()
    with torch.no_grad():
        run.model._spoil(torch.full((2, 3), torch.nan))
    spoiled = run.state()
    assert spoiled != before
    run.guard.undo_if(torch.tensor(is_bad))
    assert run.state() == (before if is_bad else spoiled)


# --- warnings when the host reads the results -----------------------------------------------------------------------


def reviewing(**keys: Any) -> tuple[Guard, list[str]]:
    warned: list[str] = []
    config = build(
        {"model_fn": Counting, "dataset_fn": list, "loss_fn": nn.functional.cross_entropy, "lanes": 1, **keys}
    )
    guard = Guard(
        ForwardState(nn.Linear(1, 1)), config, HERE, on_bad=warned.append,
        original=lambda indices: [1000 + i for i in indices], is_deferred=True,
    )  # fmt: skip
    return guard, warned


def past(step: int, *totals: tuple[float, float], is_skipped: bool = True) -> FinishedStep:
    return FinishedStep(step, [(lane, [2 * lane, 2 * lane + 1]) for lane in range(len(totals))], totals, is_skipped)


GOOD = (1.0, 2.0)


def test_the_warning_names_step_rank_lane_loss_and_samples() -> None:
    guard, warned = reviewing()
    guard.review(
        [past(3, GOOD, GOOD, is_skipped=False), past(4, GOOD, (torch.nan, 2.0)), past(5, (torch.inf, 2.0), GOOD)]
    )
    assert warned == [
        "step 5 is skipped, it is not finite: rank 0, lane 1: loss nan, samples 1002, 1003",
        "step 6 is skipped, it is not finite: rank 0, lane 0: loss inf, samples 1000, 1001",
    ]


def test_only_lanes_of_this_rank_are_reported_here_and_counts_are_checked_too() -> None:
    guard, warned = reviewing()
    guard.review([past(0, GOOD, (1.0, torch.nan))._replace(lanes=[(1, [5])])])
    guard.review([past(1, (torch.nan, 0.0), GOOD)])
    assert "rank 0, lane 1: loss nan, samples 1005" in warned[0]
    assert "rank 0, lane 0: loss nan, samples 1000, 1001" in warned[1]


def test_bad_gradients_with_good_losses_are_reported_as_such() -> None:
    guard, warned = reviewing()
    guard.review([past(0, GOOD, GOOD)])
    assert warned == ["step 1 is skipped, it is not finite: their losses are finite, their gradients are not"]


def test_the_limit_counts_steps_in_a_row_over_reviews_and_goes_into_checkpoints() -> None:
    guard, warned = reviewing(nan_limit=3)
    bad = (torch.nan, 2.0)
    guard.review([past(0, bad), past(1, bad), past(2, GOOD, is_skipped=False), past(3, bad)])
    guard.review([])
    guard.review([past(4, bad)])
    assert guard.counters() == {"skipped_in_a_row": 2}
    resumed, said_again = reviewing(nan_limit=3)
    resumed.set_counters(guard.counters())
    with pytest.raises(
        NotFinite, match=r"nan_limit=3 steps in a row were not finite, the last was step 6: rank 0, lane 0"
    ):
        resumed.review([past(5, bad), past(6, bad)])
    assert (len(warned), len(said_again)) == (4, 1)


@pytest.mark.parametrize(
    ("keys", "is_deferred"), [({"nan": "stop"}, False), ({"precision": "fp16"}, False), ({}, True)]
)
def test_only_steps_that_may_be_skipped_in_full_precision_are_left_to_the_device(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], is_deferred: bool
) -> None:
    monkeypatch.setattr("paceline.engine.phase.can_skip", lambda *arguments: True)
    config = build(
        {"model_fn": Counting, "dataset_fn": list, "loss_fn": nn.functional.cross_entropy, "lanes": 1, **keys}
    )
    model = Counting()
    stepper = Stepper(
        PlainModel(model), torch.optim.AdamW(model.parameters(), fused=True), config, Feed([], config, HERE),
        world=HERE, warn=print,
    )  # fmt: skip
    assert stepper.guard is not None
    assert stepper.guard.is_deferred == is_deferred
