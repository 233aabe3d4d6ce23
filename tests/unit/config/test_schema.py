from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from paceline.config import Config, build, override
from support.configs import MANAGED, loss, model, problems, yaml


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90), (1.5, 1.5), ("90", 90), ("1.5", 1.5), ("90s", 90), ("2m", 120), ("1h", 3600), ("1h30m", 5400),
        ("1h 30m 5s", 5405), ("1.5h", 5400), ("1h5s", 3605), ("1:30:00", 5400), ("2:05", 125), ("100:00:00", 360_000),
    ],
)  # fmt: skip
def test_a_time_limit_accepts_common_notations(text: Any, seconds: float) -> None:
    assert build({**MANAGED, "time_limit": text}).time_limit == seconds


@pytest.mark.parametrize("text", ["", "soon", "1d", "1h30", "30m1h", "1:3", "1:00:0", "-5", "1h-5m", "h", "1 : x"])
def test_an_invalid_duration_says_how_to_write_one(text: str) -> None:
    assert problems({**MANAGED, "time_limit": text}) == [
        f"time_limit={text!r} must be a number of seconds, or a duration such as 1h30m or 1:30:00"
    ]


@pytest.mark.parametrize("text", [0, -1, "0s", "0:00"])
def test_a_time_limit_must_be_positive(text: Any) -> None:
    [problem] = problems({**MANAGED, "time_limit": text})
    assert problem.startswith("time_limit=")
    assert problem.endswith("must be greater than 0")


@pytest.mark.parametrize(
    ("procs", "least_and_most"),
    [(None, None), (1, (1, 1)), (4, (4, 4)), ("4", (4, 4)), ("1:4", (1, 4)), (" 2:2 ", (2, 2)), ("2:16", (2, 16))],
)
def test_processes_are_a_number_or_a_range(procs: Any, least_and_most: tuple[int, int] | None) -> None:
    assert build({**MANAGED, "procs": procs}).procs_range == least_and_most


@pytest.mark.parametrize("procs", [0, -1, "0:2", "4:1", "1:", ":4", "1:2:3", "two", 1.5, True, "1-4", ""])
def test_an_invalid_number_of_processes_says_how_to_write_one(procs: Any) -> None:
    assert problems({**MANAGED, "procs": procs}) == [
        f"procs={procs!r} must be a number of processes, or least:most such as 1:4"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("skip", "skip"), ("stop", "stop"), ("off", "off"), ("'off'", "off"), ("no", "off"), ("false", "off")],
)
def test_off_is_accepted_although_yaml_reads_it_as_false(text: str, value: str, tmp_path: Path) -> None:
    assert build({**MANAGED, **yaml(f"nan: {text}\n", tmp_path)}).nan == value
    raw: dict[str, Any] = {**MANAGED}
    override(raw, [f"nan={text}"])
    assert build(raw).nan == value


@pytest.mark.parametrize("value", [True, "on", 0, "nan"])
def test_nan_is_one_of_three_words(value: Any) -> None:
    assert problems({**MANAGED, "nan": value}) == [f"nan={value!r} must be 'skip', 'stop' or 'off'"]


def test_async_is_a_key_although_python_reserves_the_word(tmp_path: Path) -> None:
    config = build({**MANAGED, "checkpoint": {"async": False}})
    assert config.checkpoint.is_async is False
    assert build({**MANAGED}).checkpoint.is_async is True
    assert yaml(config.to_yaml(), tmp_path)["checkpoint"]["async"] is False
    raw: dict[str, Any] = {**MANAGED}
    override(raw, ["checkpoint.async=false"])
    assert build(raw).checkpoint.is_async is False


def test_zero_turns_off_restarts_and_hang_detection() -> None:
    config = build({**MANAGED, "max_restarts": 0, "hang_timeout_s": 0})
    assert (config.max_restarts, config.hang_timeout_s) == (0, 0)


def test_the_run_to_resume_may_be_given_as_a_path() -> None:
    assert build({**MANAGED, "resume": Path("runs") / "a"}).resume == "runs/a"


@pytest.fixture
def rich_config(tmp_path: Path) -> Config:
    table = tmp_path / "points.csv"
    table.write_text("x\n1\n")
    return build(
        {
            **MANAGED,
            "name": "größe",
            "df": str(table),
            "val_df": pd.DataFrame({"x": [1.0]}),
            "run_dir": tmp_path / "run",
            "model_args": {"width": 3, "nested": [1, {"a": (1.5, "x")}]},
            "metrics": {"mean": loss},
            "optimizer": {"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.99]},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        }
    )


def test_the_written_config_reads_back_with_the_same_values(rich_config: Config, tmp_path: Path) -> None:
    read = yaml(rich_config.to_yaml(), tmp_path)
    assert read["name"] == "größe"
    assert read["optimizer"] == {"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.99]}
    assert read["schedule"] == {"name": "cosine", "warmup_steps": 2, "final": 0.0}
    assert read["model_args"] == {"width": 3, "nested": [1, {"a": [1.5, "x"]}]}
    assert read["run_dir"] == str(tmp_path / "run")
    assert read["df"] == str(tmp_path / "points.csv")
    assert "lanes" not in read  # None is not written


def test_the_written_config_names_functions_and_data(rich_config: Config, tmp_path: Path) -> None:
    read = yaml(rich_config.to_yaml(), tmp_path)
    assert read["model_fn"] == f"{model.__module__}:model"
    assert read["metrics"] == {"mean": f"{loss.__module__}:loss"}
    assert read["val_df"] == "<DataFrame>"


def test_the_written_config_builds_the_same_config(tmp_path: Path) -> None:
    config = build({**MANAGED, "seed": 3, "optimizer": {"name": "sgd", "lr": 3e-4, "momentum": 0.9}, "lanes": 2})
    assert build(yaml(config.to_yaml(), tmp_path)) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"checkpoint": {"every_minutes": None, "every_steps": 50}},
        {"checkpoint": {"async": False, "keep": 1, "best": {"metric": "train_loss", "mode": "max"}}},
        {"procs": "1:4"},
        {"time_limit": "1:30:00"},
        {"nan": "off", "resume": "auto", "max_restarts": 0, "hang_timeout_s": 0},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_the_written_config_builds_the_same_fault_tolerance(keys: dict[str, Any], tmp_path: Path) -> None:
    config = build({**MANAGED, **keys})
    assert build(yaml(config.to_yaml(), tmp_path)) == config


def test_the_written_config_names_the_folder_of_its_functions(tmp_path: Path) -> None:
    (tmp_path / "pl_lab_code").mkdir()
    (tmp_path / "pl_lab_code" / "pl_there.py").write_text("def get(*tables): pass\n")
    (tmp_path / "pl_lab_code" / "data.csv").write_text("x\n1\n")
    keys = {"model_fn": "pl_there:get", "dataset_fn": "pl_there:get", "loss_fn": "mse_loss", "df": "data.csv"}
    config = build({**keys, "folder": "pl_lab_code"}, folder=tmp_path)
    assert config.folder == tmp_path / "pl_lab_code"
    assert build(yaml(config.to_yaml(), tmp_path)) == config
    assert build({**MANAGED}).folder == Path(__file__).parents[2]  # of the module unit.config.examples
