from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from paceline.config import build, override
from paceline.errors import ConfigError
from paceline.trainer import build_config
from support.configs import MANAGED, OWN, model, problems


def test_an_unknown_key_without_a_value_is_also_a_mistake() -> None:
    assert problems({**MANAGED, "bath_size": None}) == ["bath_size is not a known key; did you mean batch_size?"]


def test_a_known_key_without_a_value_keeps_its_default() -> None:
    assert build({**MANAGED, "batch_size": None}).batch_size == 32


@pytest.mark.parametrize("raw", [MANAGED, OWN], ids=["managed", "own"])
def test_the_shortest_config_of_each_loop_is_valid(raw: dict[str, Any]) -> None:
    config = build(raw)
    assert config.function("model_fn") is model
    assert (config.batch_size, config.num_epochs, config.seed, config.val_fraction) == (32, 1, 0, 0.1)


def test_two_configs_share_no_defaults() -> None:
    first, second = build(MANAGED), build(MANAGED)
    first.model_args["width"] = 3
    first.optimizer.lr = 7.0
    assert second.model_args == {}
    assert second.optimizer.lr == 1e-3


def test_functions_by_name_are_imported_from_the_folder_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "pl_config_model.py").write_text("def get_model(): return 'mine'\n")
    config = build({**MANAGED, "model_fn": "pl_config_model:get_model"}, folder=tmp_path)
    assert config.function("model_fn")() == "mine"


def test_a_loss_without_a_module_is_from_torch() -> None:
    assert build({**MANAGED, "loss_fn": "cross_entropy"}).loss_fn is torch.nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            {"model_fn": "pl_nowhere:get_model"},
            "model_fn='pl_nowhere:get_model' names a module that does not exist: pl_nowhere.py in {folder}",
        ),
        (
            {"model_fn": "pl_config_near:get_modle"},
            "model_fn='pl_config_near:get_modle' names get_modle, which module pl_config_near does not have; "
            "did you mean get_model?",
        ),
        (
            {"model_fn": "get_model"},
            "model_fn='get_model' is not a function; write it as \"module:name\"",
        ),
        (
            {"loss_fn": "cross_entrpy"},
            "loss_fn='cross_entrpy' names cross_entrpy, which module torch.nn.functional does not have; "
            "did you mean cross_entropy?",
        ),
        (
            {"metrics": {"top5": "pl_config_near:nothing_like_it"}},
            "metrics.top5='pl_config_near:nothing_like_it' names nothing_like_it, "
            "which module pl_config_near does not have",
        ),
        (
            {"model_fn": "pl_config_near:WIDTH"},
            "model_fn='pl_config_near:WIDTH' is a int, not a function",
        ),
    ],
    ids=["module", "attribute", "no module", "loss", "metric", "not callable"],
)
def test_a_function_that_cannot_be_imported_says_why(raw: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "pl_config_near.py").write_text("WIDTH = 3\ndef get_model(): ...\n")
    assert problems({**MANAGED, **raw}, tmp_path) == [problem.format(folder=tmp_path)]


def test_an_error_inside_the_users_module_names_its_file_and_line(tmp_path: Path) -> None:
    module = tmp_path / "pl_config_broken.py"
    module.write_text("import math\n\nwidth = math.sqrt(1) / 0\n")
    assert problems({**MANAGED, "model_fn": "pl_config_broken:get_model"}, tmp_path) == [
        "model_fn='pl_config_broken:get_model' cannot be imported: "
        f"ZeroDivisionError: float division by zero ({module}:3)"
    ]


def test_further_keys_of_the_optimizer_are_kept_for_torch() -> None:
    config = build({**MANAGED, "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9}})
    assert config.optimizer.model_extra == {"momentum": 0.9}


def test_paths_of_tables_are_looked_up_in_the_folder_of_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"  # not the folder that the tests run in
    folder.mkdir()
    (folder / "points.csv").write_text("x\n1\n")
    assert build({**MANAGED, "df": "points.csv"}, folder=folder).df == folder / "points.csv"


def test_a_table_on_the_command_line_is_looked_up_in_the_working_folder_first(tmp_path: Path) -> None:
    folder, here = tmp_path / "elsewhere", Path("points.csv").resolve()
    folder.mkdir()
    (folder / "points.csv").write_text("x\n1\n")
    raw: dict[str, Any] = {**MANAGED}
    override(raw, ["df=points.csv"])
    assert build(raw, folder=folder).df == folder / "points.csv"
    here.write_text("x\n1\n")
    override(raw, ["df=points.csv"])
    assert build(raw, folder=folder).df == here


@pytest.mark.parametrize(
    ("key", "table", "problem"),
    [
        ("df", "missing.csv", "df='missing.csv' does not exist; looked for {folder}/missing.csv"),
        ("val_df", "gone.parquet", "val_df='gone.parquet' does not exist; looked for {folder}/gone.parquet"),
        ("df", "points.xlsx", "df='points.xlsx' must end in .csv, .csv.gz or .parquet"),
        ("df", 3, "df is a int; give a DataFrame or the path of a CSV or Parquet file"),
    ],
)
def test_a_table_that_cannot_be_read_is_a_mistake(key: str, table: Any, problem: str, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    assert problems({**MANAGED, key: table}, folder) == [problem.format(folder=folder)]


def test_overrides_change_keys_at_any_depth_and_keep_the_others() -> None:
    raw: dict[str, Any] = {"batch_size": 4, "optimizer": {"name": "sgd", "lr": 1}, "seed": 5}
    override(raw, ["batch_size=8", "optimizer.lr=3e-4", "schedule.name=cosine", "metrics=[accuracy, mse]"])
    assert raw == {
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 3e-4},
        "schedule": {"name": "cosine"},
        "metrics": ["accuracy", "mse"],
        "seed": 5,
    }


def test_metrics_optimizer_and_schedule_may_be_given_by_name_alone() -> None:
    config = build({**MANAGED, "metrics": "accuracy", "optimizer": "sgd", "schedule": "cosine"})
    assert config.metrics == ["accuracy"]
    assert (config.optimizer.name, config.schedule.name) == ("sgd", "cosine")


def test_an_override_inside_a_section_given_by_name_keeps_the_name() -> None:
    raw: dict[str, Any] = {**MANAGED, "optimizer": "sgd"}
    override(raw, ["optimizer.lr=0.5", "schedule=cosine", "schedule.warmup_steps=3"])
    assert (raw["optimizer"], raw["schedule"]) == ({"name": "sgd", "lr": 0.5}, {"name": "cosine", "warmup_steps": 3})


def test_an_override_by_name_alone_keeps_the_other_options() -> None:
    raw: dict[str, Any] = {**MANAGED, "optimizer": {"name": "adamw", "lr": 0.01}}
    assert override(raw, ["optimizer=sgd"]) == ["optimizer"]
    assert build(raw).optimizer.model_dump() == {"name": "sgd", "lr": 0.01}


@pytest.mark.parametrize(
    ("section", "word", "replaced"),
    [
        ({"optimizer": {"name": "adamw", "betas": [0.9, 0.99]}}, "optimizer=sgd", "optimizer={name: sgd}"),
        ({"schedule": {"name": "step", "every_epochs": 30}}, "schedule=cosine", "schedule={name: cosine}"),
    ],
)
def test_an_option_that_the_new_name_does_not_have_is_an_error(
    section: dict[str, Any], word: str, replaced: str, tmp_path: Path
) -> None:
    raw: dict[str, Any] = {**MANAGED, **section}
    with pytest.raises(ConfigError) as caught:
        build_config(raw, tmp_path, override(raw, [word]))
    assert str(caught.value).endswith(f"; or replace the section: '{replaced}'")
    build_config(raw, tmp_path, override(raw, [replaced]))


def test_the_last_of_several_overrides_counts() -> None:
    raw: dict[str, Any] = {}
    override(raw, ["seed=1", "seed=2", "model_args.width=3", "model_args.depth=4"])
    assert raw == {"seed": 2, "model_args": {"width": 3, "depth": 4}}


def test_an_override_does_not_modify_the_callers_section() -> None:
    section = {"lr": 1}
    override({"optimizer": section}, ["optimizer.lr=2"])
    assert section == {"lr": 1}


def test_an_override_that_is_not_yaml_is_read_as_text() -> None:
    raw: dict[str, Any] = {}
    override(raw, ["name=[a", "df=a=b.csv"])
    assert raw == {"name": "[a", "df": "a=b.csv"}


def test_overrides_that_are_not_assignments_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        override({}, ["batch_size", "=3", "optimizer..lr=3", "seed=1"])
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "'batch_size'",
        "'=3'",
        "'optimizer..lr=3'",
    ]


@pytest.mark.parametrize("key", ["run_dir", "folder", "df", "val_df"])
@pytest.mark.parametrize("given", [str, Path])
def test_a_url_is_refused_where_a_local_path_is_needed(key: str, given: Any) -> None:
    text = "is a URL, which Paceline cannot read or write; give a local path"
    [problem] = problems({**MANAGED, key: given("s3://bucket/run.csv")})
    assert problem.startswith(f"{key}=")
    assert problem.endswith(text)


@pytest.mark.parametrize("key", ["run_dir", "resume", "folder", "df", "val_df"])
def test_a_nul_character_in_a_path_is_refused(key: str) -> None:
    assert problems({**MANAGED, key: "\0"}) == [
        f"{key}='\\x00' contains a NUL character, which is not allowed in paths; give another path"
    ]


def test_a_table_with_a_name_that_is_too_long_does_not_exist() -> None:
    [problem] = problems({**MANAGED, "df": f"{'x' * 5000}.csv"})
    assert "does not exist; looked for" in problem


def test_windows_drives_and_colons_are_not_urls(tmp_path: Path) -> None:
    for name in ("C:/runs", "lr=1e-3:x/y", str(tmp_path / "a:b")):
        assert build({**MANAGED, "run_dir": name}).run_dir == Path(name)


def test_an_object_that_was_given_by_name_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "lab_of_objects.py").write_text("import functools\ncollator = functools.partial(sorted, key=len)\n")
    config = build({**MANAGED, "collate_fn": "lab_of_objects:collator", "model_fn": model}, folder=tmp_path)
    assert config.collate is not None
    for copied in (config, config.model_copy(update={"lanes": 4}), pickle.loads(pickle.dumps(config))):
        assert yaml.safe_load(copied.to_yaml())["collate_fn"] == "lab_of_objects:collator"
        assert yaml.safe_load(copied.to_yaml())["model_fn"] == "support.configs:model"
