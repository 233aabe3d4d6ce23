"""`step_fn` as a dict of functions, in Python and in config files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline import every
from paceline.config import build
from paceline.config.phases import Every, functions_in
from support.configs import MANAGED, yaml

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
