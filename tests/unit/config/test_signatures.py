from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import Callback
from paceline.config import build
from support.configs import MANAGED, OWN, loss, problems, train


class Sized:
    def __init__(self, df: Any = None, *, size: int = 3) -> None: ...


def test_arguments_that_a_function_does_not_take_are_found_before_it_is_called() -> None:
    def get_model(width: int = 4) -> None: ...

    keys = {"model_fn": get_model, "model_args": {"witdh": 8}, "dataset_fn": Sized, "dataset_args": {"x": 1, "size": 2}}
    assert [problem.partition(" is not an argument of ")[::2] for problem in problems({**MANAGED, **keys})] == [
        ("model_args.witdh", f"{__name__}:{get_model.__qualname__}; did you mean width?"),
        ("dataset_args.x", f"{__name__}:Sized; it takes df, size"),
    ]


def test_a_function_that_takes_any_argument_is_accepted() -> None:
    @functools.wraps(loss)
    def decorated(**options: Any) -> None: ...

    for function in (lambda **options: None, decorated, functools.partial(lambda width, **rest: None, width=3)):
        build({**MANAGED, "model_fn": function, "model_args": {"depth": 3}})
    build({**MANAGED, "model_fn": functools.partial(lambda width: None, width=3), "model_args": {"width": 4}})


def no_arguments() -> None: ...


def four_arguments(model: Any, train_loader: Any, val_loader: Any, device: Any) -> None: ...


def six_arguments(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, more: int) -> None: ...


@pytest.mark.parametrize("train_fn", [no_arguments, four_arguments, six_arguments])
def test_a_train_fn_with_another_signature_is_a_mistake(train_fn: Callable[..., Any]) -> None:
    [problem] = problems({**OWN, "train_fn": train_fn})
    assert problem.startswith(f"train_fn={__name__}:{train_fn.__name__} takes (")
    called = "train_fn(model, train_loader, val_loader, device, num_epochs), or with a further parameter run"
    assert problem.endswith(f"; it is called as {called}")


@pytest.mark.parametrize(
    "train_fn",
    [
        train,
        lambda *arguments: None,
        lambda a, b, c, d, e, more=1: None,
        lambda model, train_loader, val_loader, device, num_epochs, **options: None,
    ],
)
def test_a_train_fn_that_takes_the_five_arguments_is_accepted(train_fn: Callable[..., Any]) -> None:
    assert build({**OWN, "train_fn": train_fn}).train_fn is train_fn


def test_steps_are_called_with_a_model_and_a_batch() -> None:
    def wrong(model: Any) -> None: ...

    keys: dict[str, Any] = {**MANAGED, "loss_fn": None, "evaluate_fn": wrong, "predict_fn": lambda model, batch: None}
    assert [problem.partition(" takes ")[2] for problem in problems({**keys, "step_fn": wrong})] == [
        "(model: 'Any') -> 'None'; it is called as step_fn(model, batch)",
        "(model: 'Any') -> 'None'; it is called as evaluate_fn(model, batch)",
    ]
    build({**keys, "evaluate_fn": None, "step_fn": functools.partial(lambda scale, model, batch: None, 2.0)})


class Padding:
    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.generator = seed, None

    def __call__(self, samples: list[Any]) -> Any: ...


def test_a_class_as_collate_fn_is_a_mistake() -> None:
    [problem] = problems({**MANAGED, "collate_fn": Padding})
    assert problem == f"collate_fn={__name__}:Padding is a class; give an object of it, or a function"


def test_a_collator_with_its_own_generator_is_a_mistake() -> None:
    assert build({**MANAGED, "collate_fn": Padding()}).collate is not None
    [problem] = problems({**MANAGED, "collate_fn": Padding(seed=3)})
    assert problem.startswith(f"collate_fn={__name__}:Padding() has seed=3 and so its own random generator")


def of_three(a: Any, b: Any, c: Any) -> None: ...


@pytest.mark.parametrize(
    ("key", "called"),
    [
        ("collate_fn", "collate_fn(samples)"),
        ("order_fn", "order_fn(epoch, size)"),
        ("sample_weights", "sample_weights(dataset)"),
        ("loss_fn", "loss_fn(output, target)"),
        ("optimizer_fn", "optimizer_fn(model)"),
        ("evaluate_fn", "evaluate_fn(model, batch)"),
        ("predict_fn", "predict_fn(model, batch)"),
        ("schedule_fn", "schedule_fn(step, total_steps)"),
        ("scheduler_fn", "scheduler_fn(optimizer)"),
    ],
)
def test_a_function_is_called_with_its_arguments(key: str, called: str) -> None:
    [problem] = problems({**MANAGED, "val_fraction": 0, key: of_three})
    assert problem.startswith(f"{key}={__name__}:of_three takes (")
    assert problem.endswith(f"; it is called as {called}")


def test_a_metric_is_called_with_an_output_and_a_target() -> None:
    [problem] = problems({**MANAGED, "metrics": {"f1": of_three}})
    assert problem.startswith(f"metrics.f1={__name__}:of_three takes (")
    assert problem.endswith("; it is called as metrics(output, target)")


def test_a_class_of_torch_as_scheduler_fn_shows_its_arguments() -> None:
    [problem] = problems({**MANAGED, "scheduler_fn": torch.optim.lr_scheduler.StepLR})
    assert "step_size" in problem
    assert problem.endswith("; it is called as scheduler_fn(optimizer)")
    build({**MANAGED, "scheduler_fn": lambda optimizer, total_steps: None})


class Wrong(Callback):
    def on_start(self, run: Any, x: Any) -> None: ...  # type: ignore[override]

    def on_step(self, run: Any) -> None: ...  # type: ignore[override]

    def state_dict(self, more: Any) -> dict[str, Any]:  # type: ignore[override]
        return {}


@pytest.mark.parametrize("callback", [Wrong, Wrong()])
def test_the_methods_of_a_callback_are_called_with_their_arguments(callback: Any) -> None:
    found = problems({**MANAGED, "callbacks": [callback]})
    assert [(each.partition("=")[0], each.partition("called as ")[2]) for each in found] == [
        ("callbacks.0.on_start", "on_start(run)"),
        ("callbacks.0.on_step", "on_step(run, metrics)"),
        ("callbacks.0.state_dict", "state_dict()"),
    ]
