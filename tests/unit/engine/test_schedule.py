from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.config import Config, Schedule, build
from paceline.engine.optimizers import lrs_of
from paceline.engine.schedule import LearningRates, factor_at, make_rates
from paceline.errors import ConfigError
from support.configs import MANAGED, problems


def factors(total_steps: int, **schedule: Any) -> list[float]:
    return [factor_at(step, Schedule(**schedule), total_steps, 10) for step in range(total_steps)]


def sgd(lr: float = 1.0, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, **options)


def config_of(**keys: Any) -> Config:
    return build({**MANAGED, **keys})


def taken(rates: LearningRates, steps: int) -> list[float]:
    """The learning rates of the next updates."""
    found = []
    for step in range(steps):
        found.append(rates.apply(step))
        rates.after_update()
    return found


def torchs(optimizer: torch.optim.Optimizer, make: Callable[..., Any], steps: int) -> list[float]:
    """The learning rates of a loop that steps the scheduler after each update, as torch's documentation shows it."""
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


# --- by name ------------------------------------------------------------------------------------------------


def test_constant_is_the_base_at_every_step() -> None:
    assert factors(4) == [1.0] * 4


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "exponential", "wsd", "step", "plateau"])
def test_warm_up_rises_in_equal_parts_and_reaches_the_base_at_its_last_step(name: str) -> None:
    options = {"exponential": {"final": 0.1}, "step": {"every_epochs": 5}}.get(name, {})
    config = config_of(schedule={"name": name, "warmup_steps": 4, **options})
    assert taken(make_rates(config, sgd(2.0), 100, 10), 5) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_in_equal_parts() -> None:
    assert factors(5, name="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_falls_to_the_final_part_of_the_base() -> None:
    assert factors(4, name="linear", final=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert factor_at(4, Schedule(name="linear", final=0.2), total_steps=4) == pytest.approx(0.2)


def test_cosine_falls_along_half_a_wave() -> None:
    expected = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert factors(8, name="cosine") == pytest.approx(expected)
    assert factors(8, name="cosine")[4] == pytest.approx(0.5)


def test_cosine_falls_to_the_final_part_of_the_base() -> None:
    schedule = Schedule(name="cosine", final=0.1)
    assert factor_at(0, schedule, total_steps=10) == 1.0
    assert factor_at(5, schedule, total_steps=10) == pytest.approx(0.55)
    assert factor_at(10, schedule, total_steps=10) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_fall_begins_where_the_warm_up_ends(name: str) -> None:
    assert factors(12, name=name, warmup_steps=4)[4:] == pytest.approx(factors(8, name=name))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_warm_up_as_long_as_the_run_never_divides_by_zero(name: str) -> None:
    assert factors(3, name=name, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors(2, name=name, warmup_steps=4) == pytest.approx([1 / 4, 2 / 4])


def test_exponential_falls_by_the_same_factor_in_each_step() -> None:
    assert factors(4, name="exponential", final=1 / 16) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8])


def test_wsd_is_stable_until_its_last_part_falls_in_a_straight_line() -> None:
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert factors(10, name="wsd", warmup_steps=2, decay_fraction=0.4)[:6] == pytest.approx(expected[:6])
    assert factors(10, name="wsd", warmup_steps=2, decay_fraction=0.4)[6:] == pytest.approx(expected[6:])


@pytest.mark.parametrize(("every", "steps"), [({"every_epochs": 2}, 20), ({"every_steps": 7}, 7)])
def test_step_falls_by_its_factor_at_intervals(every: dict[str, int], steps: int) -> None:
    assert factors(50, name="step", factor=0.5, **every) == [0.5 ** (step // steps) for step in range(50)]


@pytest.mark.parametrize("total_steps", [10, 97, 1000])
def test_onecycle_is_torchs_onecycle(total_steps: int) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=total_steps, final_div_factor=100)
    ours = make_rates(config_of(schedule={"name": "onecycle", "final": 0.0004}), sgd(2.0), total_steps, None)
    expected = torchs(sgd(momentum=0.9), make, total_steps)
    assert taken(ours, total_steps) == pytest.approx(expected)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 4])
def test_onecycle_never_divides_by_zero(total_steps: int) -> None:
    assert all(0 <= factor <= 1 for factor in factors(total_steps, name="onecycle"))


def test_plateau_falls_when_the_metric_has_not_improved() -> None:
    config = config_of(schedule={"name": "plateau", "patience": 2, "factor": 0.5, "min_delta": 0.1, "final": 0.2})
    rates = make_rates(config, sgd(), None, None)
    found = []
    for value in (1.0, 0.95, 0.8, math.nan, 0.9, 0.9, 0.9, 0.9, 0.9, 0.5):
        rates.after_evaluation({"val_loss": value})
        found.append(rates.apply(0))
    assert found == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_plateau_names_the_metrics_that_are_measured() -> None:
    rates = make_rates(config_of(schedule={"name": "plateau"}), sgd(), None, None)
    with pytest.raises(ConfigError, match=r"schedule.metric='val_loss' is not measured; use train_loss, f1"):
        rates.after_evaluation({"epoch": 1, "step": 3, "train_loss": 1.0, "f1": 0.5})


def test_plateau_may_wait_for_more_of_a_metric() -> None:
    config = config_of(
        metrics=["accuracy"], schedule={"name": "plateau", "metric": "accuracy", "mode": "max", "patience": 1}
    )
    rates = make_rates(config, sgd(), None, None)
    for value in (0.1, 0.2, 0.3):
        rates.after_evaluation({"accuracy": value})
    assert rates.apply(0) == 1
    rates.after_evaluation({"accuracy": 0.3})
    assert rates.apply(0) == pytest.approx(0.1)


# --- by the user's functions --------------------------------------------------------------------------------


def test_schedule_fn_gives_the_factor() -> None:
    rates = make_rates(config_of(schedule_fn=lambda step, total_steps: 1 - step / total_steps), sgd(3.0), 3, None)
    assert taken(rates, 3) == pytest.approx([3, 2, 1])


@pytest.mark.parametrize("value", [None, "much", math.nan, math.inf, -1])
def test_schedule_fn_must_return_a_number(value: Any) -> None:
    rates = make_rates(config_of(schedule_fn=lambda step, total_steps: value), sgd(), 3, None)
    with pytest.raises(ConfigError, match=r"schedule_fn returned .* for step 0 of 3; it must return a number"):
        rates.apply(0)


SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.7),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 11], gamma=0.5),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.95),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=4),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=20),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=15, power=2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_gives_the_rates_of_a_loop_that_steps_it(name: str) -> None:
    rates = make_rates(config_of(scheduler_fn=SCHEDULERS[name]), sgd(0.8, momentum=0.9), 20, None)
    assert taken(rates, 20) == torchs(sgd(0.8, momentum=0.9), SCHEDULERS[name], 20)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_restored_scheduler_continues_with_the_same_rates_and_options(name: str, tmp_path: Any) -> None:
    config = config_of(scheduler_fn=SCHEDULERS[name])
    whole = sgd(0.8, momentum=0.9)
    rates = make_rates(config, whole, 20, None)
    taken(rates, 9)
    torch.save(rates.state_dict(), tmp_path / "state.pt")
    resumed = sgd(0.8, momentum=0.9)
    again = make_rates(config, resumed, 20, None)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.param_groups[0]["momentum"] == whole.param_groups[0]["momentum"]
    assert taken(again, 11) == taken(rates, 11)
    assert resumed.param_groups[0]["momentum"] == whole.param_groups[0]["momentum"]


def test_a_scheduler_may_set_momentum() -> None:
    optimizer = sgd(momentum=0.9)
    rates = make_rates(config_of(scheduler_fn=SCHEDULERS["OneCycleLR"]), optimizer, 20, None)
    assert rates.changes_options
    assert optimizer.param_groups[0]["momentum"] == 0.95
    taken(rates, 6)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85, abs=0.01)


def test_a_scheduler_that_sets_only_rates_changes_no_options() -> None:
    rates = make_rates(config_of(scheduler_fn=SCHEDULERS["CosineAnnealingLR"]), sgd(momentum=0.9), 20, None)
    taken(rates, 5)
    assert not rates.changes_options


def test_a_scheduler_sees_rates_as_numbers_where_the_optimizer_has_tensors() -> None:
    optimizer = sgd(0.8)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.8)
    rates = make_rates(config_of(scheduler_fn=SCHEDULERS["ExponentialLR"]), optimizer, 20, None)
    taken(rates, 2)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(float(torch.tensor(0.8)) * 0.9)
    assert isinstance(rates.lrs_at(2)[0], float)


def test_scheduler_fn_gets_the_number_of_steps_if_it_takes_it() -> None:
    def scheduler(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=total_steps)

    assert taken(make_rates(config_of(scheduler_fn=scheduler), sgd(), 4, None), 4)[2] == pytest.approx(0.75)
    with pytest.raises(ConfigError, match="scheduler_fn takes total_steps, which is unknown"):
        make_rates(config_of(scheduler_fn=scheduler), sgd(), None, None)
    named = partial(lr_scheduler.OneCycleLR, max_lr=1.0, cycle_momentum=False)
    assert taken(make_rates(config_of(scheduler_fn=named), sgd(), 10, None), 10)[2] == pytest.approx(1.0)


def test_a_scheduler_that_needs_a_metric_is_stepped_after_evaluations() -> None:
    rates = make_rates(
        config_of(scheduler_fn=partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)), sgd(), 9, None
    )
    taken(rates, 3)
    rates.after_evaluation({"train_loss": 3.0, "val_loss": 1.0})
    assert rates.apply(3) == 1
    rates.after_evaluation({"train_loss": 2.0, "val_loss": 1.0})
    assert rates.apply(3) == 0.5
    rates.after_evaluation({"train_loss": None})  # every step was skipped
    assert rates.apply(3) == 0.5


def test_a_scheduler_that_waits_for_more_of_a_metric_must_name_it() -> None:
    plateau = partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=0, factor=0.5)
    with pytest.raises(ConfigError, match=r'ReduceLROnPlateau with mode="max", which would get val_loss.*"accuracy"'):
        make_rates(config_of(scheduler_fn=plateau), sgd(), 9, None)
    named = make_rates(config_of(scheduler_fn=lambda optimizer: (plateau(optimizer), "accuracy")), sgd(), 9, None)
    for accuracy, rate in ((0.5, 1), (0.6, 1), (0.6, 0.5)):
        named.after_evaluation({"val_loss": 1.0, "accuracy": accuracy})
        assert named.apply(0) == rate
    with pytest.raises(ConfigError, match="the scheduler's metric='accuracy' is not measured; use train_loss, val_los"):
        named.after_evaluation({"epoch": 1, "train_loss": 1.0, "val_loss": 1.0})


def test_scheduler_fn_must_return_a_scheduler() -> None:
    with pytest.raises(ConfigError, match="scheduler_fn returned a int; it must return a scheduler"):
        make_rates(config_of(scheduler_fn=lambda optimizer: 3), sgd(), 9, None)


def test_a_run_that_changes_its_schedule_begins_the_new_one_afresh() -> None:
    rates = make_rates(config_of(schedule={"name": "plateau"}), sgd(), 9, None)
    rates.load_state_dict({"scheduler": {}, "options": []})
    rates.load_state_dict({})
    assert rates.apply(0) == 1


def test_the_rates_of_all_groups_are_set() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    make_rates(config_of(schedule={"name": "linear"}), optimizer, 4, None).apply(2)
    assert lrs_of(optimizer) == [0.5, 0.05]


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ({"final": 0.1}, "schedule.final=0.1 belongs to linear, cosine, exponential, onecycle, wsd, plateau; "
         "schedule.name=constant takes warmup_steps"),
        ({"name": "onecycle", "warmup_steps": 3}, "schedule.warmup_steps=3 belongs to constant, linear, cosine, "
         "exponential, wsd, step, plateau; schedule.name=onecycle takes warmup_fraction, start, final"),
        ({"name": "cosine", "patience": 3}, "schedule.patience=3 belongs to plateau; schedule.name=cosine takes "
         "warmup_steps, final"),
        ({"name": "exponential"}, "schedule.name=exponential needs final, the last factor of the learning rate; give "
         "final, such as 0.01"),
        ({"name": "step"}, "schedule.name=step needs one of every_epochs and every_steps; give one, "
         "such as 30 epochs"),
        ({"name": "plateau", "metric": "accuracy"}, "schedule.metric='accuracy' is not measured; use val_loss, "
         "train_loss"),
    ],
)  # fmt: skip
def test_options_must_belong_to_the_schedule(schedule: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "schedule": schedule}) == [problem]


def test_a_metric_that_is_not_a_loss_needs_a_mode() -> None:
    schedule = {"name": "plateau", "metric": "accuracy"}
    assert problems({**MANAGED, "metrics": ["accuracy"], "schedule": schedule}) == [
        "schedule.metric='accuracy' needs schedule.mode, whether higher or lower is better; give mode: max or min"
    ]


@pytest.mark.parametrize(
    "keys", [("schedule", "schedule_fn"), ("schedule", "scheduler_fn"), ("schedule_fn", "scheduler_fn")]
)
def test_one_way_to_give_a_schedule_excludes_the_others(keys: tuple[str, str]) -> None:
    values = {
        "schedule": "cosine",
        "schedule_fn": lambda step, total_steps: 1.0,
        "scheduler_fn": lambda optimizer: None,
    }
    given = {key: values[key] for key in keys}
    assert problems({**MANAGED, **given}) == [f"{keys[0]} and {keys[1]} are both given; keep one of them"]


def test_schedule_fn_takes_a_step_and_the_number_of_steps() -> None:
    [problem] = problems({**MANAGED, "schedule_fn": lambda step: 1.0})
    assert problem.endswith("takes (step); it is called as schedule_fn(step, total_steps)")


@pytest.mark.parametrize("name", ["linear", "cosine", "onecycle", "wsd"])
def test_a_schedule_with_an_end_needs_the_number_of_steps(name: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule.name={name} needs the number of steps"):
        make_rates(config_of(schedule=name), sgd(), None, None)


def test_a_schedule_by_epochs_needs_the_length_of_an_epoch() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.every_epochs=2 needs the number of steps in an epoch"):
        make_rates(config_of(schedule={"name": "step", "every_epochs": 2}), sgd(), 100, None)


# --- what the functions of the user must not do ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler_fn", "message"),
    [
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: -1.0), "set the learning rate -1.0; it must"),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: math.nan), "set the learning rate nan; it"),
        (
            lambda optimizer: lr_scheduler.StepLR(sgd(), 1),
            "returned a StepLR of another optimizer, which would have",
        ),
        (lambda optimizer: lr_scheduler.StepLR, "returned the class StepLR; return an instance of it"),
    ],
)
def test_a_scheduler_that_cannot_work_is_refused_before_the_first_step(scheduler_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler_fn {message}"):
        make_rates(config_of(scheduler_fn=scheduler_fn), sgd(), 10, 5)


def test_a_rate_that_becomes_nan_later_is_refused_then() -> None:
    def scheduler_fn(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step == 2 else 1.0)

    rates = make_rates(config_of(scheduler_fn=scheduler_fn), sgd(), 10, 5)
    assert taken(rates, 2) == [1.0, 1.0]
    with pytest.raises(ConfigError, match="scheduler_fn set the learning rate nan"):
        rates.apply(2)


def five(step: int, total_steps: int) -> float:
    if step == 5:
        raise ValueError("five")
    return 1.0


def test_an_error_of_schedule_fn_or_of_a_scheduler_is_one_that_a_restart_would_repeat() -> None:
    rates = make_rates(config_of(schedule_fn=five), sgd(), 10, 5)
    with pytest.raises(ConfigError, match=r"schedule_fn\(5, 10\) raised ValueError: five \(.*test_schedule\.py:\d+\)"):
        taken(rates, 6)
    short = make_rates(config_of(scheduler_fn=lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=3)), sgd(), 10, 5)
    with pytest.raises(ConfigError, match="the scheduler of scheduler_fn raised ValueError: Tried to step"):
        taken(short, 6)
