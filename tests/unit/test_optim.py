from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.config import Config, Schedule
from paceline.errors import ConfigError
from paceline.optim import lr_at, make_optimizer, optimizers, problems_with

MakeConfig = Callable[..., Config]


def rates(total_steps: int, base: float = 1.0, **schedule: Any) -> list[float]:
    return [lr_at(step, base, Schedule(**schedule), total_steps) for step in range(total_steps)]


# --- the learning rate --------------------------------------------------------------------------------------


def test_constant_is_the_base_at_every_step() -> None:
    assert rates(4, base=0.3) == [0.3] * 4


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_parts_and_reaches_the_base_at_its_last_step(name: str) -> None:
    assert rates(100, base=2.0, name=name, warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_in_equal_parts() -> None:
    assert rates(5, name="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_falls_to_the_final_part_of_the_base() -> None:
    assert rates(4, base=10, name="linear", final=0.2) == pytest.approx([10, 8, 6, 4])
    assert lr_at(4, 10, Schedule(name="linear", final=0.2), total_steps=4) == pytest.approx(2)


def test_cosine_falls_along_half_a_wave() -> None:
    expected = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates(8, name="cosine") == pytest.approx(expected)
    assert rates(8, name="cosine")[4] == pytest.approx(0.5)


def test_cosine_falls_to_the_final_part_of_the_base() -> None:
    schedule = Schedule(name="cosine", final=0.1)
    assert lr_at(0, 2.0, schedule, total_steps=10) == 2.0
    assert lr_at(5, 2.0, schedule, total_steps=10) == pytest.approx(1.1)
    assert lr_at(10, 2.0, schedule, total_steps=10) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_fall_begins_where_the_warm_up_ends(name: str) -> None:
    assert rates(12, name=name, warmup_steps=4)[4:] == pytest.approx(rates(8, name=name))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_never_divides_by_zero(name: str) -> None:
    assert rates(3, name=name, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates(2, name=name, warmup_steps=4) == pytest.approx([1 / 4, 2 / 4])


# --- optimizers by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW"])
def test_optimizers_are_found_however_they_are_written(name: str, make_config: MakeConfig) -> None:
    optimizer = make_optimizer(make_config(optimizer={"name": name}), torch.nn.Linear(2, 1))
    assert type(optimizer) is torch.optim.AdamW


def test_the_optimizer_gets_its_rate_and_its_further_keys(make_config: MakeConfig) -> None:
    config = make_config(optimizer={"name": "sgd", "lr": 0.25, "momentum": 0.5, "nesterov": True})
    [group] = make_optimizer(config, torch.nn.Linear(2, 1)).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.5, True)


def test_frozen_parameters_are_left_out(make_config: MakeConfig) -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    [group] = make_optimizer(make_config(), model).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight)]


def test_optimizer_fn_is_given_the_model(make_config: MakeConfig) -> None:
    model = torch.nn.Linear(2, 1)
    config = make_config(optimizer_fn=lambda model: torch.optim.SGD([model.bias], lr=0.5))
    [group] = make_optimizer(config, model).param_groups
    assert group["params"][0] is model.bias


def test_an_optimizer_fn_that_returns_something_else_is_an_error(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="optimizer_fn returned a list; it must return an Optimizer"):
        make_optimizer(make_config(optimizer_fn=lambda model: []), torch.nn.Linear(2, 1))


def test_every_optimizer_of_torch_is_known_but_not_their_base_class() -> None:
    assert {"adamw", "sgd", "adam", "rmsprop", "lbfgs"} <= set(optimizers())
    assert "optimizer" not in optimizers()


def test_each_wrong_argument_is_one_problem() -> None:
    found = problems_with("sgd", {"momentun": 0.9, "lr": 1, "zzz": 3})
    assert found[0] == "optimizer.momentun is not an argument of SGD; did you mean optimizer.momentum?"
    assert found[1].startswith("optimizer.zzz is not an argument of SGD; it takes lr, momentum, ")
    assert len(found) == 2


def test_an_unknown_optimizer_near_to_nothing_lists_the_known_ones() -> None:
    [problem] = problems_with("zzzz", {})
    assert "known: " in problem
    assert "adamw" in problem
