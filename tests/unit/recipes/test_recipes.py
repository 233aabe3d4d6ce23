"""Checks of every recipe."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.arguments import RECIPE_CONFIGS
from paceline.config import build, read_yaml


@pytest.mark.parametrize("recipe", RECIPE_CONFIGS)
def test_a_copy_of_the_recipe_has_a_valid_config_and_uses_its_own_functions(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    cli.app(["init", str(folder), "--recipe", recipe], standalone_mode=False)
    for path in folder.glob("*.py"):  # other tests may have imported the original
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    config = build(read_yaml(folder / "config.yaml"), folder=folder)
    assert config.name == recipe
    assert Path(inspect.getfile(config.function("model_fn"))).parent == folder
