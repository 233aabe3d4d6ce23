"""The gradients of a step in a single process, against the same sum built by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import Sum
from paceline.config import build
from paceline.data.feed import Feed
from paceline.data.lanes import Lane
from paceline.engine.clock import PhaseClock
from paceline.engine.forward_state import ForwardState
from paceline.engine.gradients import Backward
from paceline.engine.losses import number_on
from paceline.engine.nonfinite import Guard
from paceline.engine.replica import PlainModel
from paceline.engine.step import Stepper
from paceline.errors import ConfigError, DataError, UnusedParameters
from paceline.world import World
from support.models import PartlyUsed
from support.worlds import fake_world, world_of

HERE = world_of()
BATCH = 4

Batch = tuple[torch.Tensor, torch.Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def data(lanes: int, short: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    sizes = [BATCH] * (lanes - 1) + [BATCH - short]
    return [(torch.randn(n, 3, generator=generator), torch.randint(0, 2, (n,), generator=generator)) for n in sizes]


def lanes_of(batches: list[Batch], empty: tuple[int, ...] = ()) -> list[Lane]:
    samples = sum(len(y) for place, (_, y) in enumerate(batches) if place not in empty)
    return [
        Lane(0, lane, 0 if lane in empty else len(batch[1]), samples, list(range(len(batch[1]))), batch)
        for lane, batch in enumerate(batches)
    ]


def backward_of(
    model: nn.Module, lanes: int, loss_fn: Any = nn.functional.cross_entropy, world: World = HERE, **keys: Any
) -> Backward:
    config = build({"model_fn": net, "dataset_fn": list, "loss_fn": loss_fn, "lanes": lanes, **keys})
    feed = Feed([], config, world)
    clock = PhaseClock()
    return Backward(
        PlainModel(model, loss_fn),
        config,
        feed,
        None,
        world=world,
        clock=clock,
        through_ddp=False,
    )


def run_lanes(backward: Backward, lanes: list[Lane]) -> list[torch.Tensor]:
    for parameter in backward.parameters:
        parameter.grad = None
    backward.begin(lanes)
    for lane in lanes:
        backward.run_lane(lane, backward.feed.inputs(lane, 0))
    return backward.finish()


def by_hand(model: nn.Module, lanes: list[Lane], loss_fn: Any, places: int) -> list[np.ndarray]:
    """The gradient of each lane by itself, its mean weighted by its samples; their sum, rounded in integers."""
    parameters, of_lanes = list(model.parameters()), []
    for lane in lanes:
        x, y = lane.data
        total = loss_fn(model(x), y) * len(y)
        weight = torch.tensor(1 / lane.step_samples, dtype=total.dtype)
        of_lanes.append([each.numpy() for each in torch.autograd.grad(total, parameters, weight)])
    return [rounded_sum([lane[index] for lane in of_lanes], places) for index in range(len(parameters))]


def rounded_sum(of_lanes: list[np.ndarray], places: int) -> np.ndarray:
    """In Python's integers. All elements of these small gradients share one grid."""
    if places <= 2:
        return np.sum(of_lanes, axis=0)
    exponent = max(math.frexp(float(np.abs(gradient).max()))[1] for gradient in of_lanes)
    unit = 2.0 ** (exponent - 31 + places.bit_length())
    total = sum(np.rint(gradient.astype(np.float64) / unit).astype(np.int64) for gradient in of_lanes)
    return total.astype(np.float32) * np.float32(unit)


# --- sums over lanes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 6])
def test_gradients_are_the_rounded_sum_over_the_lanes_to_the_last_bit(lanes: int, find_unused: bool) -> None:
    model, taken = net(), lanes_of(data(lanes, short=1))
    totals = run_lanes(backward_of(model, lanes, find_unused_parameters=find_unused), taken)
    ours = [parameter.grad.numpy().copy() for parameter in model.parameters()]
    theirs = by_hand(model, taken, nn.functional.cross_entropy, lanes)
    assert all(np.array_equal(left, right) for left, right in zip(ours, theirs, strict=True))
    assert [count.item() for count in totals[1::2]] == [len(lane.data[1]) for lane in taken]
    x, y = taken[0].data
    assert torch.equal(totals[0], nn.functional.cross_entropy(model(x), y) * len(y))


def test_the_sum_over_lanes_is_the_gradient_of_the_mean_over_all_samples() -> None:
    model, batches = net(), data(3, short=2)
    run_lanes(backward_of(model, 3), lanes_of(batches))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    plain = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_lanes_that_are_missing_add_nothing_to_the_grid_of_all_lanes() -> None:
    """A short step of two lanes where a rank has four."""
    model, taken = net(), lanes_of(data(2))
    totals = run_lanes(backward_of(model, 4), taken)
    assert [number.item() for number in totals[4:]] == [0] * 4
    ours = [parameter.grad.numpy().copy() for parameter in model.parameters()]
    theirs = by_hand(model, taken, nn.functional.cross_entropy, 4)
    assert all(np.array_equal(left, right) for left, right in zip(ours, theirs, strict=True))


def test_a_step_leaves_nothing_for_the_next() -> None:
    model, taken = net(), lanes_of(data(3))
    backward = backward_of(model, 3)
    first = run_lanes(backward, taken), [parameter.grad.clone() for parameter in model.parameters()]
    run_lanes(backward, lanes_of(data(2, short=3)))
    second = run_lanes(backward, taken), [parameter.grad.clone() for parameter in model.parameters()]
    assert all(
        torch.equal(left, right) for pair in zip(first, second, strict=True) for left, right in zip(*pair, strict=True)
    )


def test_parameters_that_become_trainable_on_the_way_keep_no_gradients_of_earlier_steps() -> None:
    model, taken = net(), lanes_of(data(1))
    model[0].requires_grad_(False)
    backward = backward_of(model, 1)
    model[0].requires_grad_(True)
    run_lanes(backward, taken)
    first = model[0].weight.grad.clone()
    run_lanes(backward, taken)
    assert torch.equal(model[0].weight.grad, first)


def test_one_lane_alone_is_added_to_nothing() -> None:
    model, taken = net(), lanes_of(data(2))
    backward = backward_of(model, 2)
    run_lanes(backward, taken)
    alone = backward.lane_gradients(taken[1], backward.feed.inputs(taken[1], 0))
    [x, y] = taken[1].data
    plain = torch.autograd.grad(nn.functional.cross_entropy(model(x), y) / 2, list(model.parameters()))
    for left, right in zip(alone, plain, strict=True):
        torch.testing.assert_close(left, right)


def test_statistics_follow_the_first_lane() -> None:
    model, batches = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), data(3)
    run_lanes(backward_of(model, 3), lanes_of(batches))
    torch.testing.assert_close(model[0].running_mean, 0.1 * batches[0][0].mean(0))
    assert model[0].num_batches_tracked == 1


class Remembering(nn.Module):
    """Gives what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(3, 2), []
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(self.seen.clone())
        self.seen = x.detach().mean(0)
        return self.layer(x)


def test_every_lane_begins_with_the_buffers_of_the_steps_beginning() -> None:
    model, batches = Remembering(), data(3)
    backward = backward_of(model, 3)
    for _ in range(2):
        run_lanes(backward, lanes_of(batches))
    first = batches[0][0].mean(0)
    assert [given.tolist() for given in model.given] == [[0.0] * 3] * 3 + [first.tolist()] * 3
    assert torch.equal(model.seen, first)


class Following(nn.Module):
    """Moves a frozen parameter from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0
        self.far = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.near = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.near.lerp_(x.mean(0), 0.1)
            if self.calls > 2:
                self.far.lerp_(x.mean(0), 0.1)
        return self.layer(x - self.near - self.far)


def test_frozen_parameters_that_move_follow_the_first_lane_and_others_must_not_move() -> None:
    model, batches = Following(), data(2)
    backward = backward_of(model, 2)
    backward.replica.forward_state.add_moving({("", "near")})
    run_lanes(backward, lanes_of(batches))
    torch.testing.assert_close(model.near.data, 0.1 * batches[0][0].mean(0))
    with pytest.raises(ConfigError, match=r"far is frozen and was changed in step 1, .*; make it a buffer"):
        run_lanes(backward, lanes_of(batches))


class Drifting(nn.Module):
    """A loss that moves a frozen parameter from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.center = 0, nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2:
            with torch.no_grad():
                self.center.add_(1)
        return nn.functional.cross_entropy(output - self.center, target)


def test_a_frozen_parameter_of_the_loss_that_begins_to_move_is_named() -> None:
    loss, batches = Drifting(), data(2)
    backward = backward_of(net(), 2, loss)
    run_lanes(backward, lanes_of(batches))
    with pytest.raises(ConfigError, match=r"loss_fn.center is frozen and was changed in step 1, .*; make it a buffer"):
        run_lanes(backward, lanes_of(batches))


def test_parameters_that_no_loss_reaches_are_named() -> None:
    with pytest.raises(UnusedParameters, match=r"forgotten\.weight"):
        run_lanes(backward_of(PartlyUsed(3, 2), 1), lanes_of(data(1)))
    model = PartlyUsed(3, 2)
    run_lanes(backward_of(model, 2, find_unused_parameters=True), lanes_of(data(2)))
    assert model.forgotten.weight.grad is None
    assert model.used.weight.grad is not None


def test_a_batch_without_a_target_is_an_error() -> None:
    with pytest.raises(DataError, match="a batch is a Tensor; each sample of the data set must be"):
        run_lanes(backward_of(net(), 1), [Lane(0, 0, 4, 4, [0, 1, 2, 3], torch.zeros(4, 3))])


def _double(batch: Batch) -> Batch:
    return batch[0].double(), batch[1]


# --- losses of all kinds --------------------------------------------------------------------------------------------


def test_a_loss_in_float64_is_returned_and_weighted_in_float64() -> None:
    def precise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.double(), target)

    model, taken = net().double(), [lane._replace(data=_double(lane.data)) for lane in lanes_of(data(2, short=1))]
    backward = backward_of(model, 2, precise)
    totals = run_lanes(backward, taken)
    assert [total.dtype for total in totals[::2]] == [torch.float64] * 2
    ours = [parameter.grad.numpy().copy() for parameter in model.parameters()]
    theirs = by_hand(model, taken, precise, 2)
    assert all(np.array_equal(left, right) for left, right in zip(ours, theirs, strict=True))
    assert torch.cat([total.reshape(1) for total in totals]).dtype == torch.float64


COUNTED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "int": lambda total, mask: (total, int(mask.sum())),
    "whole tensor": lambda total, mask: (total, mask.sum()),
    "one element": lambda total, mask: (total, mask.sum().reshape(1)),
    "Sum of float": lambda total, mask: Sum(total, float(mask.sum())),
    "Sum of float tensor": lambda total, mask: Sum(total, mask.float().sum()),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_loss_that_counts_by_itself_is_the_mean_over_what_it_has_counted(kind: str) -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> Any:
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return COUNTED[kind]((each * (target == 1)).sum(), target == 1)

    model, batches = net(), data(3, short=1)
    totals = run_lanes(backward_of(model, 3, masked), lanes_of(batches))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    is_one = y == 1
    loss = nn.functional.cross_entropy(model(x[is_one]), y[is_one])
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(parameter.grad, gradient)
    assert sum(count.item() for count in totals[1::2]) == is_one.sum()


def test_counts_have_one_format_on_all_ranks_whatever_the_loss_gives() -> None:
    """A rank without samples has float zeros, and a gather of two formats would be a gather of rubbish."""
    gathered: list[torch.Tensor] = []
    world = fake_world(gathered=lambda counts: gathered.append(counts) or [counts])

    def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.sum(), torch.tensor(len(target))

    run_lanes(backward_of(net(), 2, counted, world), lanes_of(data(2)))
    run_lanes(backward_of(net(), 3, counted, world), lanes_of(data(2)))
    assert [counts.dtype for counts in gathered] == [torch.float64] * 2


def test_nothing_counted_is_nothing_learnt() -> None:
    model = net()
    run_lanes(backward_of(model, 2, lambda output, target: (output.sum() * 0, 0)), lanes_of(data(2)))
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_numbers_that_are_kept_survive_a_loss_that_is_a_parameter() -> None:
    """Its gradient is the weight of the lane itself, which is added to and must not be one of the kept tensors."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.only

    model = Bare()
    backward = backward_of(model, 3, lambda output, target: (output, 1))
    for _ in range(2):
        run_lanes(backward, lanes_of(data(3)))
        assert model.only.grad == pytest.approx(1.0)
    assert [number_on(number, HERE.device).item() for number in (0, 1, 1 / 12)] == pytest.approx([0, 1, 1 / 12])


# --- the NaN flag ---------------------------------------------------------------------------------------------------


def guard_of_two_ranks() -> Guard:
    config = build({"model_fn": net, "dataset_fn": list, "loss_fn": nn.functional.cross_entropy})
    return Guard(ForwardState(net()), config, replace(HERE, size=2), on_bad=print, original=list)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("losses", [[3.0], [-3.0], [0.0], [-0.0], [1e30, -1e30], [-2.0, 2.0, -0.0]])
def test_the_nan_flag_stays_minus_zero_for_losses_of_any_sign(losses: list[float], dtype: torch.dtype) -> None:
    guard = guard_of_two_ranks()
    guard.begin()
    for loss in losses:
        guard.check_loss(torch.tensor(loss, dtype=dtype, requires_grad=True))
    assert guard.nan_flag == 0
    assert guard.nan_flag.signbit()
    assert guard.nan_flag.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("losses", [[torch.nan], [torch.inf], [-torch.inf], [1.0, torch.inf, -2.0], [torch.nan, 1.0]])
def test_the_nan_flag_is_nan_after_a_loss_that_is_not_finite_until_the_next_step(
    losses: list[float], dtype: torch.dtype
) -> None:
    guard = guard_of_two_ranks()
    guard.begin()
    for loss in losses:
        guard.check_loss(torch.tensor(loss, dtype=dtype))
    assert guard.nan_flag.isnan()
    guard.begin()
    assert guard.nan_flag.signbit()
    assert guard.nan_flag == 0


def test_a_loss_in_float64_that_float32_cannot_hold_is_no_objection() -> None:
    guard = guard_of_two_ranks()
    guard.begin()
    guard.check_loss(torch.tensor(1e300, dtype=torch.float64))
    assert guard.nan_flag.signbit()
    assert guard.nan_flag == 0


def test_graphs_need_a_gpu() -> None:
    config = build(
        {"model_fn": net, "dataset_fn": list, "loss_fn": nn.functional.cross_entropy, "step_mode": "graph", "lanes": 1}
    )
    model = net()
    with pytest.raises(ConfigError, match=r"step_mode=graph needs a GPU, but the ranks run on the CPU"):
        Stepper(
            PlainModel(model), torch.optim.SGD(model.parameters()), config, Feed([], config, HERE),
            world=HERE, warn=print,
        )  # fmt: skip


def test_a_loss_is_of_one_kind_in_all_lanes() -> None:
    def mixed(output: torch.Tensor, target: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(output, target)
        return loss if len(target) == BATCH else Sum(loss * len(target), len(target))

    with pytest.raises(ConfigError, match="loss_fn returned a mean for one batch and a sum with its count for another"):
        run_lanes(backward_of(net(), 2, mixed), lanes_of(data(2, short=1)))


@pytest.mark.parametrize("lost", [lambda loss: loss.detach(), lambda loss: loss.item(), lambda loss: torch.tensor(3)])
def test_a_loss_without_a_gradient_is_one_sentence(lost: Callable[[torch.Tensor], Any]) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        return lost(nn.functional.cross_entropy(output, target))

    with pytest.raises(ConfigError, match="loss_fn returned a loss without a gradient; compute it from the model's"):
        run_lanes(backward_of(net(), 1, loss_fn), lanes_of(data(1)))
