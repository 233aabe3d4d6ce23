"""`step_fn` as a dict of functions, in Python and in config files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import every
from paceline.config import build
from paceline.config.phases import Every, functions_in
from paceline.errors import ConfigError
from support.configs import MANAGED, problems, yaml

CODE = "def first(model, batch): ...\ndef second(model, batch): ...\ndef optimizers(model): ...\n"
FILE = "step_fn:\n  a: pl_phases:first\n  b: {every: 5, fn: 'pl_phases:second'}\noptimizer_fn: pl_phases:optimizers\n"


def test_phases_of_a_config_file_are_those_of_python_and_are_written_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "pl_phases.py").write_text(CODE)
    config = build({**MANAGED, "loss_fn": None, **yaml(FILE, tmp_path)}, folder=tmp_path)
    steps: Any = config.step_fn
    assert list(steps) == ["a", "b"]
    assert isinstance(steps["b"], Every)
    assert [function.__name__ for function in functions_in(steps)] == ["first", "second"]
    written = yaml(config.to_yaml(), tmp_path)
    assert written["step_fn"] == {"a": "pl_phases:first", "b": {"every": 5, "fn": "pl_phases:second"}}


def test_a_phase_runs_first_at_its_nth_step() -> None:
    phase = every(3, lambda model, batch: (model, batch))
    assert [step + 1 for step in range(10) if phase.is_due(step)] == [3, 6, 9]
    assert phase(1, 2) == (1, 2)


def step(model: Any, batch: Any) -> None: ...


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ({"c": step, "g": 3}, "has the phase g=3; use a function, or {every: 5, fn: function}"),
        ({"c": step, "g": {"every": 0, "fn": step}}, "has the phase g at every=0; use a positive number of steps"),
        ({"c": step, 2: step}, "has a phase named 2, which is not a string; name the phase as in optimizer_fn"),
    ],
)
def test_a_wrong_phase_is_one_sentence(steps: Any, problem: str) -> None:
    keys = {**MANAGED, "loss_fn": None, "step_fn": steps, "optimizer_fn": lambda model: None}
    [found] = problems(keys)
    assert found.startswith("step_fn={")
    assert found.endswith(problem)


@pytest.mark.parametrize("function", [None, 5, every(2, step)])
def test_an_interval_needs_a_function_without_one(function: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"every\(3, .*\) needs a function of the model and a batch; use every\(5, fun"
    ):
        every(3, function)
