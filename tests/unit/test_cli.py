"""cli/: what commands say without a process of their own."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import cli
from paceline.cli.arguments import RECIPE_CONFIGS
from paceline.cli.train import next_steps


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def test_what_to_try_next_repeats_the_overrides_for_a_shell(tmp_path: Path) -> None:
    result = SimpleNamespace(run_dir=tmp_path, metrics={"accuracy": 1.0})
    overrides = ["df=my table.csv", "num_epochs=9", "procs=4", "run_dir=here", "optimizer={name: sgd, lr: 3}"]
    again, *others = next_steps(result, "tabular", overrides)
    repeated = ["df=my table.csv", "optimizer={name: sgd, lr: 3}"]
    assert words(again) == ["paceline", "train", "tabular", *repeated, "--procs", "1", "num_epochs=2"]
    assert [words(line) for line in others] == [["paceline", "evaluate", str(tmp_path)], ["paceline", "init", "mylab"]]


def test_curves_are_offered_where_there_are_some_and_a_project_to_those_without_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    result = SimpleNamespace(run_dir=tmp_path / "run", metrics={})
    assert len(next_steps(result, str(tmp_path), [])) == 1
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    assert len(next_steps(result, str(tmp_path), [])) == 1
    (tmp_path / "run" / "tensorboard" / "events.out").touch()
    assert words(next_steps(result, str(tmp_path), [])[1]) == ["paceline", "board", str(tmp_path / "run")]


@pytest.mark.parametrize("recipe", RECIPE_CONFIGS)
def test_the_copy_of_a_recipe_is_trained_as_the_recipe_is(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["init", "my lab", "--recipe", recipe], standalone_mode=False)
    _, *lines = capsys.readouterr().out.splitlines()
    told = [words(line) for line in lines]
    table = ["df=covtype.csv"] if recipe == "tabular" else []
    assert told[-1] == ["cd", "my lab", "&&", "paceline", "train", "config.yaml", *table, "num_epochs=5"]
    brings = {"lm": "data", "mnist": "data", "text": "model"}
    assert [command[1:3] for command in told[:-1]] == ([[brings[recipe], "get"]] if recipe in brings else [])
