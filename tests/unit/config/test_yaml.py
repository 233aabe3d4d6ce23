from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import build, read_yaml
from paceline.errors import ConfigError
from support.configs import MANAGED, yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5e-3", 0.5e-3),
        ("-2e3", -2e3),
        ("+1.5e+3", 1.5e3),
        ("1.e4", 1e4),
        ("1e4x", "1e4x"),
        ("x1e4", "x1e4"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'1e4'", "1e4"),
        ("12", 12),
        ("1.5", 1.5),
        ("1:4", "1:4"),
        ("1:30:00", "1:30:00"),
        ("190:20:30.15", "190:20:30.15"),
        ("-1:30", "-1:30"),
        ("0x1f", 31),
        ("1_000", 1000),
        ("true", True),
    ],
)
def test_yaml_reads_common_notations_of_numbers(text: str, value: Any, tmp_path: Path) -> None:
    read = yaml(f"key: {text}\n", tmp_path)["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seed: 1\nname: a\nseed: 2\n", "seed"),
        ("optimizer:\n  lr: 1\n  lr: 2\n", "lr"),
        ("a: {b: 1, b: 1}", "b"),
    ],
)
def test_a_yaml_key_given_twice_is_a_mistake(text: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.yaml is not valid YAML: {key} is given twice .*line \d"):
        yaml(text, tmp_path)


def test_yaml_merges_mappings(tmp_path: Path) -> None:
    text = "base: &base {lr: 1e-3}\noptimizer:\n  <<: *base\n  name: sgd\n"
    assert yaml(text, tmp_path)["optimizer"] == {"lr": 1e-3, "name": "sgd"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1", "is not valid YAML: "),
        ("- a\n- b\n", "must contain `key: value` lines, not a list"),
        ("", "must contain `key: value` lines, not a NoneType"),
    ],
)
def test_a_file_that_is_not_a_config_is_named_in_the_error(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml(text, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'} {what}")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file or directory"):
        read_yaml(tmp_path / "missing.yaml")


def test_numbers_of_numpy_can_be_written() -> None:
    config = build({**MANAGED, "model_args": {"dropout": np.float64(0.5), "width": np.int64(3)}})
    assert "dropout: 0.5" in config.to_yaml()


def test_a_text_that_looks_like_a_number_is_read_back_as_text(tmp_path: Path) -> None:
    assert yaml(build({**MANAGED, "name": "12e4"}).to_yaml(), tmp_path)["name"] == "12e4"


def test_aliases_that_expand_to_billions_of_values_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="has more than 100,000 values"):
        read_yaml(tmp_path / "config.yaml")
