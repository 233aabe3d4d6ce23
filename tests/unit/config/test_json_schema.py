"""The JSON schema of config.yaml: what it accepts and marks, and that it is in projects and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline import cli
from paceline.cli.arguments import PACKAGE
from paceline.config import build, json_schema, read_yaml
from support.configs import MANAGED, yaml

FILES = sorted([*PACKAGE.glob("recipes/*/*.yaml"), *PACKAGE.glob("templates/*/*.yaml")])
NAMES = {"model_fn": "lab:model", "dataset_fn": "lab:data", "loss_fn": "cross_entropy"}
SCHEMA = json_schema()


def mistakes(values: dict[str, Any]) -> list[str]:
    """The keys and the reasons that an editor marks."""
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_it_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_and_templates_have_no_mistake(path: Path) -> None:
    assert mistakes(read_yaml(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: adamw",
        "optimizer: {name: sgd, lr: 0.1, momentum: 0.9}",
        "schedule: cosine",
        "schedule: {name: step, every_epochs: 30}",
        "metrics: accuracy",
        "metrics: {top5: 'lab:top5'}",
        "callbacks: lab:Callback",
        "step_fn: {critic: 'lab:critic', generator: {every: 5, fn: 'lab:generator'}}",
        "time_limit: 1h30m",
        "procs: 1:4",
        "sample_weights: [1, 2.5]",
        "checkpoint: {every_minutes: null, every_steps: 5, best: {metric: accuracy, mode: max}, async: false}",
        "log: {trackers: wandb}",
        "lanes:",
    ],
)
def test_every_form_of_a_value_is_accepted(text: str, tmp_path: Path) -> None:
    assert mistakes({**NAMES, **yaml(text, tmp_path)}) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("bath_size: 4", "bath_size"),
        ("log: {evry_steps: 5}", "evry_steps"),
        ("num_epochs: three", "num_epochs"),
        ("batch_size: 0", "batch_size"),
        ("val_fraction: 1.0", "val_fraction"),
        ("tf32: 'yes'", "tf32"),
        ("precision: fp8", "precision"),
        ("schedule: cosin", "schedule"),
        ("model_fn: get_model", "model_fn"),
        ("optimizer: {lr: fast}", "optimizer"),
        ("procs: 1-4", "procs"),
        ("checkpoint: 5", "checkpoint"),
        ("step_fn: {critic: {evry: 5, fn: 'lab:critic'}}", "step_fn"),
    ],
)
def test_a_mistake_is_marked_at_its_key(text: str, key: str, tmp_path: Path) -> None:
    [mistake] = mistakes({**NAMES, **yaml(text, tmp_path)})
    assert key in mistake


@pytest.mark.parametrize("keys", [{}, {"schedule": "plateau", "early_stop": {}, "procs": "1:2", "time_limit": "2h"}])
def test_the_config_in_a_run_folder_has_no_mistake(keys: dict[str, Any], tmp_path: Path) -> None:
    assert mistakes(yaml(build({**MANAGED, **keys}).to_yaml(), tmp_path)) == []


def test_keys_have_descriptions_without_links_and_their_defaults() -> None:
    assert "](" not in json.dumps(SCHEMA)
    properties = SCHEMA["properties"]
    assert properties["batch_size"]["default"] == 32
    assert properties["nan"]["enum"] == ["skip", "stop", "off"]
    assert properties["lanes"]["description"].endswith("Default: the number of processes.")
    assert properties["model_fn"]["description"].endswith("Required.")
    assert SCHEMA["$defs"]["Checkpoint"]["properties"]["keep"]["description"]


@pytest.mark.parametrize("options", [[], ["--managed"], ["--recipe", "digits"]], ids=" ".join)
def test_a_new_project_has_the_schema_that_the_command_prints(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.app(["init", str(tmp_path / "lab"), *options], standalone_mode=False)
    capsys.readouterr()
    cli.app(["schema"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert json.loads(printed) == SCHEMA
    first = (tmp_path / "lab" / "config.yaml").read_text(encoding="utf-8").partition("\n")[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert (tmp_path / "lab" / name).read_text(encoding="utf-8") == printed
    assert read_yaml(tmp_path / "lab" / "config.yaml")["model_fn"]
