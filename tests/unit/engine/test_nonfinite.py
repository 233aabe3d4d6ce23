"""Steps that are not finite, taken by one process: what is unchanged afterwards, and the warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Sum
from paceline.config import build
from paceline.data.feed import Feed
from paceline.data.lanes import Lane, StepInputs
from paceline.engine.digest import sha256_of_optimizer
from paceline.engine.nonfinite import GROW_AFTER, LossScale, are_finite
from paceline.engine.reduce import add_flag
from paceline.engine.replica import PlainModel
from paceline.engine.schedule import LearningRates
from paceline.engine.step import Stepper
from paceline.errors import ConfigError, NotFinite
from support import models
from support.worlds import world_of

HERE = world_of()
BATCH = 4
ADAMW = {"name": "adamw", "lr": 0.01}

Batch = tuple[torch.Tensor, torch.Tensor]


def normed() -> nn.Module:
    torch.manual_seed(0)
    return models.normed(width=8)


def batch(seed: int, poison: float | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(BATCH, 3, generator=generator), torch.randint(0, 2, (BATCH,), generator=generator)
    if poison is not None:
        x[1, 1] = poison
    return x, y


class Renumbered(Feed):
    """What the user knows the samples by."""

    def original_indices(self, indices: Any) -> list[int]:
        return [1000 + index for index in indices]


class Run:
    """A Stepper without processes, with explicit inputs; `warned` has its warnings."""

    def __init__(self, model: nn.Module, *, lanes: int = 1, loss_fn: Any = nn.functional.cross_entropy, **keys: Any):
        options = {
            "optimizer": ADAMW,
            "model_fn": normed,
            "dataset_fn": list,
            "loss_fn": loss_fn,
            "lanes": lanes,
            **keys,
        }
        config = build(options)
        self.model, self.lanes, self.warned = model, lanes, list[str]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.stepper = Stepper(
            PlainModel(model), optimizer, config, Renumbered([], config, HERE),
            rates=LearningRates(optimizer, lambda step: 1 / (1 + step)), world=HERE,
            warn=self.warned.append,
        )  # fmt: skip

    def take(self, step: int, *batches: Batch) -> torch.Tensor:
        samples = sum(len(y) for _, y in batches)
        taken = []
        for lane, data in enumerate(batches):
            indices = list(range(lane * BATCH, lane * BATCH + len(data[1])))
            taken.append(Lane(step, lane, len(data[1]), samples, indices, data))
        result = self.stepper.take(StepInputs(step, 0, taken, ends_epoch=False, ends_run=False))
        assert result.is_skipped == 0  # the host has decided
        return result.lane_losses

    def state(self) -> dict[str, Any]:
        """All that a step may change, to the last bit."""
        averages = self.stepper.ema.averages() if self.stepper.ema is not None else {}
        kept = {**self.model.state_dict(), **{f"average {name}": value for name, value in averages.items()}}
        return {name: tensor.numpy().tobytes() for name, tensor in kept.items()} | {
            "optimizer": sha256_of_optimizer(self.stepper.optimizer)
        }


class Explode(torch.autograd.Function):
    """Passes numbers on; its gradient is infinite for those above 50."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mark,) = ctx.saved_tensors
        return torch.where(mark[:, None] > 50, torch.inf, gradient), None


class Exploding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Explode.apply(self.net(x.clamp(-3, 3)), x[:, 1])


# --- a skipped step changes nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_weights_optimizer_average_and_buffers_stay_as_they_were(poison: float, lanes: int) -> None:
    run = Run(normed(), lanes=lanes, ema=0.9, clip_norm=0.5)
    run.take(0, *(batch(seed) for seed in range(lanes)))
    before = run.state()
    # The bad lane is the last; lane 0, whose statistics BatchNorm keeps, is fine where there are several.
    totals = run.take(1, *(batch(seed, poison if seed == lanes - 1 else None) for seed in range(lanes)))
    assert run.state() == before
    assert totals.tolist() == [[0, 0]] * lanes
    assert run.take(2, *(batch(seed) for seed in range(lanes))).isfinite().all()
    assert run.state() != before


def test_training_continues_as_a_plain_loop_that_leaves_the_step_out() -> None:
    run = Run(normed())
    for step in range(5):
        run.take(step, batch(step, float("nan") if step in (1, 3) else None))
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in (0, 2, 4):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)  # the schedule knows the step, skipped or not
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(dict(run.model.state_dict()), dict(model.state_dict()))
    assert len(run.warned) == 2


def test_a_run_without_bad_steps_has_the_bits_that_it_has_without_the_check() -> None:
    on, off = Run(normed(), lanes=2), Run(normed(), lanes=2, nan="off")
    for step in range(4):
        on.take(step, batch(step), batch(step + 10))
        off.take(step, batch(step), batch(step + 10))
    assert on.state() == off.state()
    assert off.stepper.counters() == {}


def test_off_lets_it_through() -> None:
    run = Run(normed(), nan="off")
    assert run.take(0, batch(0, float("nan"))).isnan().any()
    assert run.model[0].weight.isnan().all()
    assert run.warned == []


def test_buffers_that_a_forward_pass_replaces_are_restored() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x[:1, 0]])
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.net(x)

    run = Run(Growing())
    run.take(0, batch(0))
    before = run.state()
    assert len(run.model.seen) == 3
    run.take(1, batch(1, float("inf")))
    assert run.state() == before
    run.take(2, batch(2))
    assert len(run.model.seen) == 4


# --- what counts as bad ---------------------------------------------------------------------------------------------


def test_a_bad_loss_counts_even_where_no_gradient_shows_it() -> None:
    """clamp's gradient is zero for NaN, so a target that is missing spoils the loss alone."""

    def clamped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - target).clamp(-9, 9).square().mean()

    run = Run(normed(), loss_fn=clamped)
    before = run.state()
    x, y = batch(0)
    run.take(0, (x, torch.where(y == y[0], torch.nan, y)))
    assert run.state() == before
    assert "loss nan" in run.warned[0]


def test_the_nan_flag_of_a_good_step_changes_no_bit_of_the_gradients() -> None:
    guard = Run(normed()).stepper.guard
    gradient = torch.tensor([-0.0])
    guard.begin()
    guard.check_loss(torch.tensor(3.0))
    add_flag(guard.nan_flag, gradient)
    assert gradient.signbit()
    guard.check_loss(torch.tensor(torch.inf))
    add_flag(guard.nan_flag, gradient)
    assert gradient.isnan()


def test_infinite_gradients_of_a_finite_loss_are_traced_to_their_lane() -> None:
    run = Run(Exploding(), lanes=3)
    before = run.state()
    run.take(6, batch(0), batch(1, 60.0), batch(2))
    assert run.state() == before
    assert run.warned == [
        "step 7 is skipped, it is not finite: rank 0, lane 1: gradients, samples 1004, 1005, 1006, 1007"
    ]
    run.take(7, batch(0), batch(1), batch(2))
    assert run.state() != before


def test_a_count_that_is_no_number_is_a_bad_loss() -> None:
    run = Run(normed(), loss_fn=lambda output, target: Sum(output.sum(), torch.tensor(torch.nan)))
    run.take(0, batch(0))
    assert "lane 0: loss nan" in run.warned[0]


def test_a_lane_without_samples_has_no_say() -> None:
    run = Run(normed(), lanes=2, find_unused_parameters=True)
    lanes = [Lane(0, 0, BATCH, BATCH, [0, 1, 2, 3], batch(0)), Lane(0, 1, 0, BATCH, [0, 1, 2, 3], batch(1, torch.nan))]
    assert run.stepper.take(StepInputs(0, 0, lanes, ends_epoch=False, ends_run=False)).lane_losses[0, 1] == BATCH
    assert run.warned == []


def test_gradients_of_all_kinds_are_looked_at() -> None:
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns if this is not set
        sparse = torch.sparse_coo_tensor([[1]], [torch.inf], (4,))
    for bad in (
        torch.tensor([1.0, torch.nan]), torch.tensor(-torch.inf, dtype=torch.float64), sparse,
        torch.tensor([complex(0, torch.nan)]), torch.tensor([torch.inf], dtype=torch.bfloat16),
    ):  # fmt: skip
        assert are_finite([torch.ones(3), torch.ones(2, dtype=torch.float64), torch.zeros(0)])
        assert not are_finite([torch.ones(3), bad])
    halves = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    assert are_finite(halves, 0.5)
    assert [half.tolist() for half in halves] == [[0.5] * 3, [0.5] * 2]
    assert are_finite([])


# --- warnings, and the end of the run -------------------------------------------------------------------------------


def test_the_warning_names_step_rank_lane_loss_and_samples() -> None:
    run = Run(normed(), lanes=2)
    run.take(4, batch(0), batch(1, float("nan")))
    assert run.warned == [
        "step 5 is skipped, it is not finite: rank 0, lane 1: loss nan, samples 1004, 1005, 1006, 1007"
    ]


def test_long_lists_are_cut() -> None:
    x, y = batch(0, float("nan"))
    run = Run(normed(), lanes=6)
    run.take(0, *[(x.repeat(3, 1), y.repeat(3))] * 6)
    assert "1007 and 4 more" in run.warned[0]
    assert run.warned[0].count("lane ") == 4
    assert run.warned[0].endswith("; and 2 more lanes")


def test_stop_ends_at_the_first_bad_step_and_leaves_the_weights() -> None:
    run = Run(normed(), nan="stop")
    before = run.state()
    with pytest.raises(NotFinite, match=r"nan=stop and step 1 is not finite: rank 0, lane 0: loss nan, samples 1000, "):
        run.take(0, batch(0, float("nan")))
    assert run.state() == before
    assert run.warned == []


def test_the_limit_counts_steps_in_a_row_and_goes_into_checkpoints() -> None:
    run = Run(normed(), nan_limit=3)
    for step, poison in enumerate([torch.nan, torch.nan, None, torch.nan, torch.nan]):
        run.take(step, batch(step, poison))
    assert run.stepper.counters() == {"skipped_in_a_row": 2}
    resumed = Run(normed(), nan_limit=3)
    resumed.stepper.set_counters(run.stepper.counters())
    with pytest.raises(NotFinite, match=r"nan_limit=3 steps in a row were not finite, the last was step 6: rank 0"):
        resumed.take(5, batch(5, torch.nan))
    assert len(resumed.warned) == 1


# --- fp16 -----------------------------------------------------------------------------------------------------------


def test_fp16_skips_in_silence_until_its_scale_fits() -> None:
    run = Run(normed(), precision="fp16", loss_fn=lambda output, target: 3e3 * output.square().mean(), nan="stop")
    before, skipped = run.state(), 0
    while not run.take(skipped, batch(0)).any():
        assert run.state() == before
        skipped += 1
    assert skipped > 0
    assert run.stepper.counters() == {"skipped_in_a_row": 0, "scale": 2.0 ** (16 - skipped), "good_steps": 1}
    assert run.state() != before
    assert run.warned == []


def test_fp16_gives_nearly_the_gradients_of_fp32() -> None:
    half, full = Run(normed(), precision="fp16", clip_norm=100), Run(normed())
    half.take(0, batch(0))
    full.take(0, batch(0))
    for ours, theirs in zip(half.model.parameters(), full.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=1e-3)


def test_a_bad_loss_in_fp16_is_reported_and_leaves_the_scale_as_it_is() -> None:
    run = Run(normed(), precision="fp16")
    run.take(0, batch(0, torch.nan))
    assert "loss nan" in run.warned[0]
    assert run.stepper.counters()["scale"] == 2.0**16


@pytest.mark.parametrize("nan", ["skip", "stop", "off"])
def test_fp16_that_never_fits_ends_with_advice(nan: str) -> None:
    run = Run(Exploding(), precision="fp16", nan=nan, nan_limit=4)
    for step in range(3):
        run.take(step, batch(step, 60.0))
    with pytest.raises(NotFinite, match=r"nan_limit=4 .* the loss scale fell to 4096; use precision: bf16"):
        run.take(3, batch(3, 60.0))


def test_the_scale_doubles_after_good_steps_and_goes_into_checkpoints() -> None:
    scaler = LossScale(good_steps=GROW_AFTER - 2)
    scaler.grow()
    assert scaler == LossScale(2.0**16, GROW_AFTER - 1)
    scaler.grow()
    assert scaler == LossScale(2.0**17, 0)
    run = Run(normed(), precision="fp16")
    run.stepper.set_counters({"skipped_in_a_row": 1, "scale": 8.0, "good_steps": 5})
    assert run.stepper.counters() == {"skipped_in_a_row": 1, "scale": 8.0, "good_steps": 5}
    run.stepper.set_counters({})  # of a run that was not in fp16
    assert run.stepper.counters()["scale"] == 8.0


@pytest.mark.parametrize("message", ["\"foo\" not implemented for 'Half'", "could not create a primitive descriptor"])
def test_an_operator_that_fp16_lacks_is_an_error_with_advice(message: str) -> None:
    def lacking(output: torch.Tensor, target: torch.Tensor) -> Callable[..., Any]:
        raise RuntimeError(message)

    with pytest.raises(ConfigError, match=r"precision=fp16 but an operator has no kernel.*; use another precision"):
        Run(normed(), precision="fp16", loss_fn=lacking).take(0, batch(0))
    with pytest.raises(RuntimeError, match=message[:5]):
        Run(normed(), loss_fn=lacking).take(0, batch(0))
