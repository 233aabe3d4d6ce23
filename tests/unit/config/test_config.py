from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from paceline.config import Config, build, override, read_yaml
from paceline.errors import ConfigError


def model(**options: Any) -> None: ...
def dataset(*tables: Any, **options: Any) -> None: ...
def loss(output: Any, target: Any) -> None: ...
def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None: ...


MANAGED = {"model_fn": model, "dataset_fn": dataset, "loss_fn": loss}
OWN = {"model_fn": model, "dataset_fn": dataset, "train_fn": train}


def problems(raw: dict[Any, Any], folder: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(raw, folder=folder)
    return caught.value.problems


def yaml(text: str, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


# --- every mistake at once ----------------------------------------------------------------------------------


def test_every_mistake_is_reported_together(tmp_path: Path) -> None:
    found = problems(
        {
            "bath_size": 4,
            "num_epochs": "three",
            "val_fraction": 1.0,
            "log": {"evry_steps": 5},
            "model_fn": "paceline_no_such_module:get_model",
            "train_fn": lambda model: None,
            "optimizer": {"name": "sdg"},
            "metrics": ["accurcy"],
            "df": "missing.csv",
            "device": "cpu",
            "backend": "nccl",
        },
        tmp_path,
    )
    beginnings = [
        "bath_size is not a known key; did you mean batch_size?",
        "num_epochs='three' input should be a valid integer",
        "val_fraction=1.0 input should be less than 1",
        "log.evry_steps is not a known key; did you mean log.every_steps?",
        "dataset_fn is missing;",
        "metrics, optimizer belong to the managed loop;",
        "backend=nccl cannot work with device=cpu;",
        "model_fn='paceline_no_such_module:get_model' names a module that does not exist",
        "train_fn=",
        "optimizer.name='sdg' is not an optimizer of torch.optim; did you mean sgd?",
        "metrics='accurcy' is not known;",
        "df='missing.csv' does not exist;",
    ]
    assert len(found) == len(beginnings)
    assert [b for b in beginnings if not any(problem.startswith(b) for problem in found)] == []


def test_the_error_reads_as_one_line_a_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        build({**MANAGED, "batch_size": 0, "procs": 0})
    assert str(caught.value).splitlines() == [
        "batch_size=0 input should be greater than or equal to 1",
        "procs=0 must be a number of processes, or least:most such as 1:4",
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"bath_size": 4}, "bath_size is not a known key; did you mean batch_size?"),
        ({"epochs": 4}, "epochs is not a known key; did you mean num_epochs?"),
        ({"lr": 3}, "lr is not a known key; did you mean optimizer.lr?"),
        ({"every_steps": 3}, "every_steps is not a known key; did you mean checkpoint.every_steps or log.every_steps?"),
        (
            {"schedule": {"warmpu_steps": 3}},
            "schedule.warmpu_steps is not a known key; did you mean schedule.warmup_steps?",
        ),
        ({"log": {"evry_steps": 3}}, "log.evry_steps is not a known key; did you mean log.every_steps?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(raw: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **raw}) == [problem]


class Sized:
    def __init__(self, df: Any, *, size: int = 3) -> None: ...


def test_arguments_that_a_function_does_not_take_are_found_before_it_is_called() -> None:
    def get_model(width: int = 4) -> None: ...

    keys = {"model_fn": get_model, "model_args": {"witdh": 8}, "dataset_fn": Sized, "dataset_args": {"x": 1, "size": 2}}
    assert [problem.partition(" is not an argument of ")[::2] for problem in problems({**MANAGED, **keys})] == [
        ("model_args.witdh", f"{__name__}:{get_model.__qualname__}; did you mean width?"),
        ("dataset_args.x", f"{__name__}:Sized; it takes df, size"),
    ]


def test_a_function_that_may_take_any_argument_is_believed() -> None:
    @functools.wraps(loss)
    def decorated(**options: Any) -> None: ...

    for function in (lambda **options: None, decorated, functools.partial(lambda width, **rest: None, width=3)):
        build({**MANAGED, "model_fn": function, "model_args": {"depth": 3}})
    build({**MANAGED, "model_fn": functools.partial(lambda width: None, width=3), "model_args": {"width": 4}})


def test_an_unknown_key_that_is_near_to_nothing_lists_the_known_ones() -> None:
    [problem] = problems({**MANAGED, "log": {"zzz": 1}})
    assert problem.startswith("log.zzz is not a known key; known keys: every_steps")


@pytest.mark.parametrize("key", ["batch-size", "batch size (train)", 3])
def test_an_unknown_key_may_be_spelt_with_any_character(key: Any) -> None:
    assert problems({**MANAGED, key: 4})[0].startswith(f"{key} is not a known key")


def test_an_unknown_key_without_a_value_is_a_mistake_too() -> None:
    assert problems({**MANAGED, "bath_size": None}) == ["bath_size is not a known key; did you mean batch_size?"]


def test_a_known_key_without_a_value_keeps_its_default() -> None:
    assert build({**MANAGED, "batch_size": None}).batch_size == 32


def test_a_function_that_is_none_says_what_to_give() -> None:
    assert problems({**MANAGED, "model_fn": 3}) == [
        'model_fn=3 is not a function; give a function, or "module:name" in a config'
    ]


def test_a_wrong_loss_fn_is_not_called_missing_as_well() -> None:
    assert problems({**MANAGED, "loss_fn": 3}) == [
        'loss_fn=3 is not a function; give a function, or "module:name" in a config'
    ]


def test_long_values_are_cut_short_in_the_message() -> None:
    [problem] = problems({**MANAGED, "batch_size": "x" * 500})
    assert len(problem) < 200


# --- what belongs together ----------------------------------------------------------------------------------


def test_without_train_fn_and_loss_fn_both_ways_are_named() -> None:
    [problem] = problems({"model_fn": model, "dataset_fn": dataset})
    assert problem.startswith("train_fn and loss_fn are both missing; give train_fn")


@pytest.mark.parametrize(
    "extra",
    [
        {"loss_fn": loss},
        {"metrics": ["accuracy"]},
        {"optimizer": {"lr": 0.1}},
        {"optimizer_fn": model},
        {"schedule": {"name": "cosine"}},
        {"clip_norm": 1.0},
        {"max_steps": 3},
        {"lanes": 2},
        {"checkpoint": {"keep": 2}},
        {"time_limit": "1h"},
        {"nan": "stop"},
        {"nan_limit": 3},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_keys_of_the_managed_loop_conflict_with_train_fn(extra: dict[str, Any]) -> None:
    [key] = extra
    assert problems({**OWN, **extra}) == [
        f"{key} belongs to the managed loop; remove train_fn, or do it inside train_fn"
    ]


def test_train_fn_may_start_from_the_beginning_but_not_from_a_checkpoint() -> None:
    build({**OWN, "resume": "auto"})
    assert problems({**OWN, "resume": "runs/a/checkpoints/step-00000003"}) == [
        "resume=runs/a/checkpoints/step-00000003 names a run to continue, but Paceline keeps no checkpoints for "
        "train_fn; use --resume auto to start from the beginning, or load a checkpoint of your own inside train_fn"
    ]


def test_keys_with_their_defaults_are_in_nobodys_way() -> None:
    """The config of a run has all keys, and can be trained again."""
    build({**OWN, "loss_fn": None, "ema": None, "val_dataset_fn": dataset, "val_fraction": 0.1})


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            {"optimizer": {"lr": 0.1}, "optimizer_fn": model},
            "optimizer and optimizer_fn are both given; keep one of them",
        ),
        (
            {"val_df": pd.DataFrame(), "val_fraction": 0.5},
            "val_df and val_fraction are both given; keep one of them",
        ),
        (
            {"val_dataset_fn": dataset, "val_fraction": 0.5},
            "val_dataset_fn and val_fraction are both given; keep one of them",
        ),
        ({"device": "cpu", "backend": "nccl"}, "backend=nccl cannot work with device=cpu; use backend: gloo"),
        ({"compression": "bf16"}, "compression=bf16 rounds the sums by the number of ranks; set exact: false"),
        (
            {"compression": "powersgd", "exact": False, "find_unused_parameters": True},
            "compression=powersgd cannot be used with find_unused_parameters=true; use bf16 or fp16",
        ),
        ({"sync_batchnorm": True}, "sync_batchnorm=true takes its statistics over all ranks; set exact: false"),
        (
            {"sync_batchnorm": True, "exact": False, "device": "cpu"},
            "sync_batchnorm=true cannot work with device=cpu, torch has it for GPUs; remove one of them",
        ),
    ],
    ids=["optimizer", "val_df", "val_dataset_fn", "backend", "compression", "powersgd", "sync_batchnorm", "statistics"],
)
def test_keys_that_exclude_each_other_are_a_mistake(raw: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **raw}) == [problem]


@pytest.mark.parametrize("extra", [{"max_restarts": 2}, {"hang_timeout_s": 5}, {"procs": "1:2"}])
def test_keys_of_the_launcher_are_for_both_loops(extra: dict[str, Any]) -> None:
    [key] = extra
    assert getattr(build({**OWN, **extra}), key) == extra[key]


def test_the_best_checkpoint_needs_a_metric_that_is_measured() -> None:
    best = {"checkpoint": {"best": {"metric": "acuracy", "mode": "max"}}}
    assert problems({**MANAGED, **best, "metrics": ["accuracy", "mse"]}) == [
        "checkpoint.best.metric='acuracy' is not measured; use val_loss, train_loss, accuracy, mse"
    ]
    for metric in ("val_loss", "train_loss", "accuracy", "mine"):
        metrics = {"accuracy": loss, "mine": loss}
        config = build({**MANAGED, "metrics": metrics, "checkpoint": {"best": {"metric": metric}}})
        assert config.checkpoint.best is not None
        assert config.checkpoint.best.metric == metric


def test_metrics_that_are_wrong_are_the_only_mistake_reported() -> None:
    found = problems({**MANAGED, "metrics": 3, "checkpoint": {"best": {"metric": "accuracy"}}})
    assert {problem.partition(" ")[0] for problem in found} == {"metrics=3"}


@pytest.mark.parametrize("raw", [MANAGED, OWN], ids=["managed", "own"])
def test_the_shortest_config_of_each_loop_is_right(raw: dict[str, Any]) -> None:
    config = build(raw)
    assert config.function("model_fn") is model
    assert (config.batch_size, config.num_epochs, config.seed, config.val_fraction) == (32, 1, 0, 0.1)


def test_two_configs_share_no_defaults() -> None:
    first, second = build(MANAGED), build(MANAGED)
    first.model_args["width"] = 3
    first.optimizer.lr = 7.0
    assert second.model_args == {}
    assert second.optimizer.lr == 1e-3


# --- durations, processes, checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90), (1.5, 1.5), ("90", 90), ("1.5", 1.5), ("90s", 90), ("2m", 120), ("1h", 3600), ("1h30m", 5400),
        ("1h 30m 5s", 5405), ("1.5h", 5400), ("1h5s", 3605), ("1:30:00", 5400), ("2:05", 125), ("100:00:00", 360_000),
    ],
)  # fmt: skip
def test_a_time_limit_is_written_as_people_do(text: Any, seconds: float) -> None:
    assert build({**MANAGED, "time_limit": text}).time_limit == seconds


@pytest.mark.parametrize("text", ["", "soon", "1d", "1h30", "30m1h", "1:3", "1:00:0", "-5", "1h-5m", "h", "1 : x"])
def test_what_is_no_duration_says_how_to_write_one(text: str) -> None:
    assert problems({**MANAGED, "time_limit": text}) == [
        f"time_limit={text!r} must be a number of seconds, or a duration such as 1h30m or 1:30:00"
    ]


@pytest.mark.parametrize("text", [0, -1, "0s", "0:00"])
def test_a_time_limit_is_more_than_nothing(text: Any) -> None:
    [problem] = problems({**MANAGED, "time_limit": text})
    assert problem.startswith("time_limit=")
    assert problem.endswith("input should be greater than 0")


@pytest.mark.parametrize(
    ("procs", "least_and_most"),
    [(None, None), (1, (1, 1)), (4, (4, 4)), ("4", (4, 4)), ("1:4", (1, 4)), (" 2:2 ", (2, 2)), ("2:16", (2, 16))],
)
def test_processes_are_a_number_or_a_range(procs: Any, least_and_most: tuple[int, int] | None) -> None:
    assert build({**MANAGED, "procs": procs}).procs_range == least_and_most


@pytest.mark.parametrize("procs", [0, -1, "0:2", "4:1", "1:", ":4", "1:2:3", "two", 1.5, True, "1-4", ""])
def test_what_is_no_number_of_processes_says_how_to_write_one(procs: Any) -> None:
    assert problems({**MANAGED, "procs": procs}) == [
        f"procs={procs!r} must be a number of processes, or least:most such as 1:4"
    ]


def test_several_processes_need_ddp() -> None:
    assert problems({**MANAGED, "procs": "2:4", "ddp": False}) == [
        "procs=2:4 needs DDP; remove ddp: false, or use --procs 1"
    ]
    assert build({**MANAGED, "procs": "1:4", "ddp": False}).procs_range == (1, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("skip", "skip"), ("stop", "stop"), ("off", "off"), ("'off'", "off"), ("no", "off"), ("false", "off")],
)
def test_off_is_a_word_although_yaml_takes_it_for_false(text: str, value: str, tmp_path: Path) -> None:
    assert build({**MANAGED, **yaml(f"nan: {text}\n", tmp_path)}).nan == value
    raw: dict[str, Any] = {**MANAGED}
    override(raw, [f"nan={text}"])
    assert build(raw).nan == value


@pytest.mark.parametrize("value", [True, "on", 0, "nan"])
def test_what_to_do_about_nan_is_one_of_three_words(value: Any) -> None:
    assert problems({**MANAGED, "nan": value}) == [f"nan={value!r} input should be 'skip', 'stop' or 'off'"]


def test_async_is_a_key_although_it_is_a_word_of_python(tmp_path: Path) -> None:
    config = build({**MANAGED, "checkpoint": {"async": False}})
    assert config.checkpoint.is_async is False
    assert build({**MANAGED}).checkpoint.is_async is True
    assert yaml(config.to_yaml(), tmp_path)["checkpoint"]["async"] is False
    raw: dict[str, Any] = {**MANAGED}
    override(raw, ["checkpoint.async=false"])
    assert build(raw).checkpoint.is_async is False


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        ({"is_async": False}, "checkpoint.is_async is not a known key; did you mean checkpoint.async?"),
        ({"every_step": 5}, "checkpoint.every_step is not a known key; did you mean checkpoint.every_steps?"),
        ({"best": {"mtric": "x"}}, "checkpoint.best.mtric is not a known key; did you mean checkpoint.best.metric?"),
        (
            {"best": "accuracy"},
            "checkpoint.best='accuracy' must say which way is better; "
            "give {metric: accuracy, mode: max} or {metric: accuracy, mode: min}",
        ),
        ({"best": {"mode": "least"}}, "checkpoint.best.mode='least' input should be 'min' or 'max'"),
        ({"keep": 0}, "checkpoint.keep=0 input should be greater than or equal to 1"),
        ({"every_steps": 0}, "checkpoint.every_steps=0 input should be greater than or equal to 1"),
        ({"every_minutes": 0}, "checkpoint.every_minutes=0 input should be greater than 0"),
    ],
)
def test_mistakes_about_checkpoints_are_named(checkpoint: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "checkpoint": checkpoint}) == [problem]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"max_restarts": -1}, "max_restarts=-1 input should be greater than or equal to 0"),
        ({"hang_timeout_s": -1}, "hang_timeout_s=-1 input should be greater than or equal to 0"),
        ({"nan_limit": 0}, "nan_limit=0 input should be greater than or equal to 1"),
    ],
)
def test_numbers_out_of_range_are_mistakes(keys: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **keys}) == [problem]


def test_zero_turns_off_restarts_and_the_watch_for_hangs() -> None:
    config = build({**MANAGED, "max_restarts": 0, "hang_timeout_s": 0})
    assert (config.max_restarts, config.hang_timeout_s) == (0, 0)


def test_a_run_to_go_on_with_may_be_given_as_a_path() -> None:
    assert build({**MANAGED, "resume": Path("runs") / "a"}).resume == "runs/a"


# --- functions ----------------------------------------------------------------------------------------------


def test_functions_by_name_come_from_the_folder_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "pl_config_model.py").write_text("def get_model(): return 'mine'\n")
    config = build({**MANAGED, "model_fn": "pl_config_model:get_model"}, folder=tmp_path)
    assert config.function("model_fn")() == "mine"


def test_a_bare_name_of_a_loss_is_one_of_torch() -> None:
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
def test_a_function_that_is_not_there_says_why(raw: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "pl_config_near.py").write_text("WIDTH = 3\ndef get_model(): ...\n")
    assert problems({**MANAGED, **raw}, tmp_path) == [problem.format(folder=tmp_path)]


def test_an_error_inside_the_users_module_names_its_file_and_line(tmp_path: Path) -> None:
    module = tmp_path / "pl_config_broken.py"
    module.write_text("import math\n\nwidth = math.sqrt(1) / 0\n")
    assert problems({**MANAGED, "model_fn": "pl_config_broken:get_model"}, tmp_path) == [
        "model_fn='pl_config_broken:get_model' cannot be imported: "
        f"ZeroDivisionError: float division by zero ({module}:3)"
    ]


def no_arguments() -> None: ...
def four_arguments(model: Any, train_loader: Any, val_loader: Any, device: Any) -> None: ...
def six_arguments(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, more: int) -> None: ...


@pytest.mark.parametrize("train_fn", [no_arguments, four_arguments, six_arguments])
def test_a_train_fn_with_another_signature_is_a_mistake(train_fn: Callable[..., Any]) -> None:
    [problem] = problems({**OWN, "train_fn": train_fn})
    assert problem.startswith(f"train_fn={__name__}:{train_fn.__name__} takes (")
    assert problem.endswith("; it is called as train_fn(model, train_loader, val_loader, device, num_epochs)")


@pytest.mark.parametrize(
    "train_fn",
    [
        train,
        lambda *arguments: None,
        lambda a, b, c, d, e, more=1: None,
        lambda model, train_loader, val_loader, device, num_epochs, **options: None,
    ],
)
def test_a_train_fn_that_takes_the_five_arguments_is_right(train_fn: Callable[..., Any]) -> None:
    assert build({**OWN, "train_fn": train_fn}).train_fn is train_fn


# --- optimizers, metrics, tables ----------------------------------------------------------------------------


def test_further_keys_of_the_optimizer_go_to_torch() -> None:
    config = build({**MANAGED, "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9}})
    assert config.optimizer.model_extra == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (
            {"name": "adamww"},
            "optimizer.name='adamww' is not an optimizer of torch.optim; did you mean adamw?",
        ),
        (
            {"name": "adamw", "weight_dacay": 0.1},
            "optimizer.weight_dacay is not an argument of AdamW; did you mean optimizer.weight_decay?",
        ),
        ({"lr": 0}, "optimizer.lr=0 input should be greater than 0"),
    ],
)
def test_typos_in_the_optimizer_are_mistakes(optimizer: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "optimizer": optimizer}) == [problem]


@pytest.mark.parametrize("loss_fn", ["binary_cross_entropy", torch.nn.BCELoss()])
def test_accuracy_does_not_go_with_a_loss_of_probabilities(loss_fn: Any) -> None:
    [problem] = problems({**MANAGED, "loss_fn": loss_fn, "metrics": ["accuracy"]})
    assert problem.endswith("use binary_cross_entropy_with_logits, and no sigmoid in the model")
    build({**MANAGED, "loss_fn": loss_fn, "metrics": ["mse"]})


def test_a_loss_with_weights_of_its_own_is_refused_unless_they_are_frozen() -> None:
    critic = torch.nn.PReLU()
    [problem] = problems({**MANAGED, "loss_fn": critic})
    assert problem.startswith("loss_fn has weights of its own, which nobody would train; make them a part of the model")
    build({**MANAGED, "loss_fn": critic.requires_grad_(False)})
    build({**MANAGED, "loss_fn": torch.nn.CrossEntropyLoss(weight=torch.ones(2))})


@pytest.mark.parametrize("name", ["step", "epoch", "event", "val_loss", "train_loss"])
def test_a_metric_has_a_name_of_its_own(name: str) -> None:
    assert problems({**MANAGED, "metrics": {name: lambda output, target: 0.0}}) == [
        f"metrics.{name} has the name of something else that is told of an epoch; choose another name"
    ]


def yielding(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> Any:
    yield from train_loader


async def waiting(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None:
    pass


def test_a_train_fn_that_would_not_run_when_it_is_called_is_a_mistake() -> None:
    [first], [second] = problems({**OWN, "train_fn": yielding}), problems({**OWN, "train_fn": waiting})
    assert first.endswith("yielding has a yield, so a call of it would train nothing; use a plain function")
    assert second.endswith("waiting is async, so a call of it would train nothing; use a plain function")


def test_an_unknown_metric_lists_the_known_ones() -> None:
    assert problems({**MANAGED, "metrics": ["accuracy", "f1"]}) == [
        "metrics='f1' is not known; use accuracy, mse, mae, or {f1: function}"
    ]


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


# --- YAML and the command line ------------------------------------------------------------------------------


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
def test_yaml_reads_numbers_as_people_write_them(text: str, value: Any, tmp_path: Path) -> None:
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
        ("- a\n- b\n", "must hold `key: value` lines, not a list"),
        ("", "must hold `key: value` lines, not a NoneType"),
    ],
)
def test_a_file_that_is_no_config_says_so_with_its_path(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml(text, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'} {what}")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file or directory"):
        read_yaml(tmp_path / "missing.yaml")


def test_overrides_reach_keys_at_any_depth_and_leave_the_others() -> None:
    raw: dict[str, Any] = {"batch_size": 4, "optimizer": {"name": "sgd", "lr": 1}, "seed": 5}
    override(raw, ["batch_size=8", "optimizer.lr=3e-4", "schedule.name=cosine", "metrics=[accuracy, mse]"])
    assert raw == {
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 3e-4},
        "schedule": {"name": "cosine"},
        "metrics": ["accuracy", "mse"],
        "seed": 5,
    }


def test_a_name_alone_will_do_for_metrics_optimizer_and_schedule() -> None:
    config = build({**MANAGED, "metrics": "accuracy", "optimizer": "sgd", "schedule": "cosine"})
    assert config.metrics == ["accuracy"]
    assert (config.optimizer.name, config.schedule.name) == ("sgd", "cosine")


def test_an_override_inside_a_section_that_was_a_name_keeps_the_name() -> None:
    raw: dict[str, Any] = {**MANAGED, "optimizer": "sgd"}
    override(raw, ["optimizer.lr=0.5", "schedule=cosine", "schedule.warmup_steps=3"])
    assert (raw["optimizer"], raw["schedule"]) == ({"name": "sgd", "lr": 0.5}, {"name": "cosine", "warmup_steps": 3})


def test_the_last_of_several_overrides_counts() -> None:
    raw: dict[str, Any] = {}
    override(raw, ["seed=1", "seed=2", "model_args.width=3", "model_args.depth=4"])
    assert raw == {"seed": 2, "model_args": {"width": 3, "depth": 4}}


def test_an_override_does_not_write_into_the_section_it_was_given() -> None:
    section = {"lr": 1}
    override({"optimizer": section}, ["optimizer.lr=2"])
    assert section == {"lr": 1}


def test_an_override_that_is_no_yaml_is_taken_as_text() -> None:
    raw: dict[str, Any] = {}
    override(raw, ["name=[a", "df=a=b.csv"])
    assert raw == {"name": "[a", "df": "a=b.csv"}


def test_overrides_that_are_no_assignment_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        override({}, ["batch_size", "=3", "optimizer..lr=3", "seed=1"])
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "'batch_size'",
        "'=3'",
        "'optimizer..lr=3'",
    ]


# --- the config as it is written into the run folder --------------------------------------------------------


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
    assert "lanes" not in read  # what is not decided is not written


def test_the_written_config_names_functions_and_data(rich_config: Config, tmp_path: Path) -> None:
    read = yaml(rich_config.to_yaml(), tmp_path)
    assert read["model_fn"] == f"{__name__}:model"
    assert read["metrics"] == {"mean": f"{__name__}:loss"}
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
def test_the_written_config_builds_the_same_safety(keys: dict[str, Any], tmp_path: Path) -> None:
    config = build({**MANAGED, **keys})
    assert build(yaml(config.to_yaml(), tmp_path)) == config


def test_the_written_config_tells_where_its_functions_are(tmp_path: Path) -> None:
    (tmp_path / "pl_lab_code").mkdir()
    (tmp_path / "pl_lab_code" / "pl_there.py").write_text("def get(*tables): pass\n")
    (tmp_path / "pl_lab_code" / "data.csv").write_text("x\n1\n")
    keys = {"model_fn": "pl_there:get", "dataset_fn": "pl_there:get", "loss_fn": "mse_loss", "df": "data.csv"}
    config = build({**keys, "folder": "pl_lab_code"}, folder=tmp_path)
    assert config.folder == tmp_path / "pl_lab_code"
    assert build(yaml(config.to_yaml(), tmp_path)) == config
    assert build({**MANAGED}).folder == Path(__file__).parents[2]  # of the module unit.config.test_config


def test_numbers_of_numpy_can_be_written() -> None:
    config = build({**MANAGED, "model_args": {"dropout": np.float64(0.5), "width": np.int64(3)}})
    assert "dropout: 0.5" in config.to_yaml()


def test_a_text_that_looks_like_a_number_is_read_back_as_text(tmp_path: Path) -> None:
    assert yaml(build({**MANAGED, "name": "12e4"}).to_yaml(), tmp_path)["name"] == "12e4"


def test_every_key_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [key for key in Config.model_fields if f"`{key}`" not in text] == []


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["run_dir", "resume", "folder", "df", "val_df"])
@pytest.mark.parametrize("given", [str, Path])
def test_a_url_is_refused_where_a_local_path_is_needed(key: str, given: Any) -> None:
    text = "is a URL, which Paceline cannot read or write; give a local path"
    [problem] = problems({**MANAGED, key: given("s3://bucket/run.csv")})
    assert problem.startswith(f"{key}=")
    assert problem.endswith(text)


@pytest.mark.parametrize("key", ["run_dir", "resume", "folder", "df", "val_df"])
def test_a_nul_character_in_a_path_is_one_sentence(key: str) -> None:
    assert problems({**MANAGED, key: "\0"}) == [
        f"{key}='\\x00' has a NUL character in it, as no path can; give another path"
    ]


def test_a_table_whose_name_no_file_can_have_does_not_exist() -> None:
    [problem] = problems({**MANAGED, "df": f"{'x' * 5000}.csv"})
    assert "does not exist; looked for" in problem


def test_a_value_that_an_optimizer_fails_on_is_one_sentence() -> None:
    assert problems({**MANAGED, "optimizer": {"name": "adamw", "betas": {"a": 1}}}) == [
        "optimizer={name: adamw, …} cannot be made with these values of betas (KeyError: 0); "
        "give them as torch.optim.AdamW takes them"
    ]


def test_windows_drives_and_colons_are_no_urls(tmp_path: Path) -> None:
    for name in ("C:/runs", "lr=1e-3:x/y", str(tmp_path / "a:b")):
        assert build({**MANAGED, "run_dir": name}).run_dir == Path(name)


def test_aliases_that_stand_for_billions_of_values_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="has more than 100,000 values"):
        read_yaml(tmp_path / "config.yaml")
