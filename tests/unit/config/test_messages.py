from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import build
from paceline.errors import ConfigError
from support.configs import MANAGED, problems


def test_the_error_has_one_line_for_each_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        build({**MANAGED, "batch_size": 0, "procs": 0})
    assert str(caught.value).splitlines() == [
        "batch_size=0 must be greater than or equal to 1",
        "procs=0 must be a number of processes, or least:most such as 1:4",
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"bath_size": 4}, "bath_size is not a known key; did you mean batch_size?"),
        ({"every_minutes": 3}, "every_minutes is not a known key; did you mean checkpoint.every_minutes?"),
        (
            {"schedule": {"warmpu_steps": 3}},
            "schedule.warmpu_steps is not a known key; did you mean schedule.warmup_steps?",
        ),
        ({"log": {"evry_steps": 3}}, "log.evry_steps is not a known key; did you mean log.every_steps?"),
    ],
)
def test_an_unknown_key_suggests_the_most_similar_known_key(raw: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **raw}) == [problem]


def test_an_unknown_key_without_a_similar_one_lists_the_known_keys() -> None:
    [problem] = problems({**MANAGED, "log": {"zzz": 1}})
    assert problem.startswith("log.zzz is not a known key; known keys: every_steps")


@pytest.mark.parametrize("key", ["batch-size", "batch size (train)", 3])
def test_an_unknown_key_may_contain_any_character(key: Any) -> None:
    assert problems({**MANAGED, key: 4})[0].startswith(f"{key} is not a known key")


def test_a_value_that_is_not_a_function_says_what_to_give() -> None:
    assert problems({**MANAGED, "model_fn": 3}) == [
        'model_fn=3 is not a function; pass a function, or write "module:name" in a config'
    ]


def test_an_optimizer_or_scheduler_of_torch_is_answered_with_the_key_for_it_in_one_line() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    first, second = problems({**MANAGED, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR})
    assert first == (
        "optimizer=<SGD> has the parameters of a model outside the run; write "
        'optimizer={"name": "sgd", "lr": 0.001}, or optimizer_fn=lambda model: SGD(model.parameters())'
    )
    assert second.endswith("; to use an object, write scheduler_fn, a function of the optimizer that returns it")


def test_long_values_are_shortened_in_the_message() -> None:
    [problem] = problems({**MANAGED, "batch_size": "x" * 500})
    assert len(problem) < 200


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        ({"is_async": False}, "checkpoint.is_async is not a known key; did you mean checkpoint.async?"),
        ({"every_step": 5}, "checkpoint.every_step is not a known key; did you mean checkpoint.every_steps?"),
        ({"best": {"mtric": "x"}}, "checkpoint.best.mtric is not a known key; did you mean checkpoint.best.metric?"),
        (
            {"best": "accuracy"},
            "checkpoint.best='accuracy' needs a mode: whether higher or lower is better; "
            "write {metric: accuracy, mode: max} or {metric: accuracy, mode: min}",
        ),
        ({"best": {"mode": "least"}}, "checkpoint.best.mode='least' must be 'min' or 'max'"),
        ({"keep": 0}, "checkpoint.keep=0 must be greater than or equal to 1"),
        ({"every_steps": 0}, "checkpoint.every_steps=0 must be greater than or equal to 1"),
        ({"every_minutes": 0}, "checkpoint.every_minutes=0 must be greater than 0"),
        (
            {"every_minutes": "often"},
            "checkpoint.every_minutes='often' must be a number of minutes, auto, or null for never",
        ),
    ],
)
def test_mistakes_in_the_checkpoint_section_are_named(checkpoint: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "checkpoint": checkpoint}) == [problem]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"max_restarts": -1}, "max_restarts=-1 must be greater than or equal to 0"),
        ({"hang_timeout_s": -1}, "hang_timeout_s=-1 must be greater than or equal to 0"),
        ({"nan_limit": 0}, "nan_limit=0 must be greater than or equal to 1"),
    ],
)
def test_numbers_out_of_range_are_mistakes(keys: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **keys}) == [problem]


class Summary:
    """A metric that is updated and never called."""

    def reset(self) -> None: ...

    def update(self, output: Any, target: Any) -> None: ...

    def compute(self) -> float:
        return 1.0


NOT_NAMES = "is not a list of names; for your own functions, use {name: function(output, target)}"


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (len, NOT_NAMES),
        ([len], NOT_NAMES),
        (3, NOT_NAMES),
        ({"a": 3}, "has a=3, which is not a function; use a function(output, target)"),
        ({3: len}, "has the name 3, which is not a string; use {name: function(output, target)}"),
        ({"a": Summary}, "has the class Summary as a; pass an instance of it, or a function"),
    ],
)
def test_wrong_metrics_are_one_sentence(metrics: Any, problem: str) -> None:
    [found] = problems({**MANAGED, "metrics": metrics})
    assert found.startswith("metrics=")
    assert found.endswith(problem)


def test_a_metric_that_is_updated_needs_no_call() -> None:
    metric = Summary()
    assert build({**MANAGED, "metrics": {"a": metric}}).metrics == {"a": metric}
    assert "a: " in build({**MANAGED, "metrics": {"a": metric}}).to_yaml()


@pytest.mark.parametrize("raw", [{"lanes": True}, {"schedule": {"name": "plateau", "patience": True}}])
def test_a_truth_value_is_not_a_number(raw: dict[str, Any]) -> None:
    [found] = problems({**MANAGED, **raw})
    assert found.endswith("=True is not a number; write a number")


def test_a_truth_value_that_another_library_has_is_answered() -> None:
    assert problems({**MANAGED, "clip_norm": True}) == ["clip_norm=True has no meaning here; write clip_norm=1.0"]
