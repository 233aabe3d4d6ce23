"""Modules outside the model that a step uses are found, whatever form the step has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.engine.outer_state import check_outer_weights, modules_of, outer_state, place_steps
from paceline.errors import ConfigError
from support.configs import settings_of
from support.models import RunningLoss

MakeConfig = Callable[..., Config]
used, unused = RunningLoss(), RunningLoss()


def helper(output: Any, target: Any) -> Any:
    return used(output, target)


def through_helper(model: Any, batch: Any) -> Any:
    return helper(model(batch[0]), batch[1])


def with_default(model: Any, batch: Any, loss: nn.Module = used) -> Any:
    return loss(model(batch[0]), batch[1])


def with_argument(loss: Any, model: Any, batch: Any) -> Any:
    return loss(model(batch[0]), batch[1])


def in_closure() -> Callable[..., Any]:
    loss = used
    return lambda model, batch: loss(model(batch[0]), batch[1])


class Task:
    """A step as a method, and as an object that can be called."""

    def __init__(self) -> None:
        self.loss = used

    def step(self, model: Any, batch: Any) -> Any:
        return self.loss(model(batch[0]), batch[1])

    __call__ = step


held: dict[str, Any] = {"losses": [used]}


def in_a_dict(model: Any, batch: Any) -> Any:
    return held["losses"][0](model(batch[0]), batch[1])


FORMS = {
    "a list in a global dict": in_a_dict,
    "a global of a function that it calls": through_helper, "a default": with_default, "a closure": in_closure(),
    "a partial": functools.partial(with_argument, used), "a method": Task().step, "an object": Task(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_modules_that_a_step_uses_are_found(form: str) -> None:
    assert [module for _, module in modules_of(FORMS[form])] == [used]


def test_the_state_of_all_phases_is_one_module_with_each_once(make_config: MakeConfig) -> None:
    phases = {"first": through_helper, "second": with_default, "third": lambda model, batch: model(batch)}
    config = make_config(loss_fn=None, step_fn=phases, optimizer_fn=lambda model: {})
    state = outer_state(settings_of(config))
    assert state is not None
    assert list(state.children()) == [used]
    assert outer_state(settings_of(make_config())) is None


def test_a_step_that_is_a_module_is_copied_so_that_another_run_starts_from_the_original() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, model: Any, batch: Any) -> Any:
            return self.mean

    step = Step()
    placed = place_steps({"only": step}, torch.device("cpu"))["only"]
    placed.mean += 1
    assert step.mean == 0


heads = {"a.b": nn.Linear(2, 2)}


def in_heads(model: Any, batch: Any) -> Any:
    return heads["a.b"](model(batch[0])).mean()


def test_trainable_weights_in_a_global_dict_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"step_fn uses heads\[a_b\], which is outside the model and has trainable"):
        check_outer_weights(settings_of(make_config(loss_fn=None, step_fn=in_heads)))
