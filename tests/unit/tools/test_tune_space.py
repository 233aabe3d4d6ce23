"""The search space, the goal, the shares of a machine and the report, none of which needs a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.config import build, override, read_yaml
from paceline.errors import ConfigError
from paceline.tools.tune import report
from paceline.tools.tune.goal import Goal, pick_goal
from paceline.tools.tune.report import TrialRow
from paceline.tools.tune.shares import MachineShare, shares_of
from paceline.tools.tune.space import Choices, Range, examples_of, parse, words_of

# --- the space ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "domain"),
    [
        (["log(1e-4,1e-1)"], Range(1e-4, 1e-1, is_log=True)),
        (["log:1e-4:1e-1"], Range(1e-4, 1e-1, is_log=True)),
        (["uniform(0, 0.5)"], Range(0, 0.5)),
        (["(-1,.5)"], Range(-1, 0.5)),
        (["uniform:0:1:0.25"], Range(0, 1, step=0.25)),
        (["int(1,8)"], Range(1, 8, is_int=True)),
        (["int:64:512:64"], Range(64, 512, is_int=True, step=64)),
        (["logint:16:1e3"], Range(16, 1000, is_log=True, is_int=True)),
        (["{32,64,128}"], Choices((32, 64, 128))),
        (["32", "64", "128"], Choices((32, 64, 128))),  # how bash expands the line above
        (["{1e-3, 1e-2}"], Choices((1e-3, 1e-2))),
        (["{adamw,sgd}"], Choices(("adamw", "sgd"))),
        (["{true,null}"], Choices((True, None))),
        (["[64, 64]", "[128]"], Choices(([64, 64], [128]))),
        (["{32}"], Choices((32,))),
    ],
)
def test_ranges_and_choices_in_every_spelling(texts: list[str], domain: Range | Choices) -> None:
    assert parse([f"key.inner={text}" for text in texts]) == ({"key.inner": domain}, [])


@pytest.mark.parametrize(
    "word",
    [
        "batch_size=32",
        "optimizer={name: sgd, lr: 0.1}",
        "model_fn=log:get_model",
        "name=a(b)",
        "df=x.csv",
        "metrics=[]",
    ],
)
def test_a_key_with_one_value_is_set_and_not_searched(word: str) -> None:
    assert parse([word]) == ({}, [word])
    assert parse([word, word]) == ({}, [word])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lr=log(0,1)"], "lr=log(0,1) starts at 0; the ends of a logarithmic range must be above 0"),
        (["lr=log(1,0.1)"], "lr=log(1,0.1) ends below its start; give the smaller number first"),
        (["lr=log(1)"], "lr=log(1) needs two numbers; write log(low,high)"),
        (["lr=log:1:2:3"], "lr=log:1:2:3 needs two numbers; write log(low,high)"),
        (["lr=log(a,b)"], "lr=log(a,b) is not a range of numbers; write, for example, log(1,10)"),
        (["lr=lin(1,2)"], "lr=lin(1,2) is not a known kind of range; use uniform, log, int, logint"),
        (["n=int(1,2.5)"], "n=int(1,2.5) needs integers; use uniform for other numbers"),
        (["n=int:1:4:9"], "n=int:1:4:9 has the step 9; use a step above 0 that is smaller than the range"),
        (["n=int(1,4)", "n=8"], "n=int(1,4) 8 mixes a range with other values; write one range, or only values"),
        (
            ["name={2024-01-01,b}"],
            "name={2024-01-01,b} contains values that are not numbers or text; put dates in quotes",
        ),
        (["n={1,1}"], "n={1,1} is not a set of values; write {a, b, c}, each once"),
    ],
)
def test_a_wrong_range_is_refused_with_a_reason(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(words)
    assert error.value.problems == [problem]


def test_all_wrong_ranges_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["a=log(0,1)", "b=(2,1)"])
    assert len(error.value.problems) == 2


def test_examples_show_both_ends_and_each_choice() -> None:
    space, _ = parse(["n=int:1:5", "size={1,2,3}"])
    assert examples_of(space) == [{"n": 1, "size": 1}, {"n": 5, "size": 2}, {"n": 1, "size": 3}]
    fraction = examples_of(parse(["lr=uniform:1:2"])[0])[-1]["lr"]
    assert 1 < fraction < 2  # a key that takes whole numbers refuses it
    assert examples_of({}) == [{}]


def test_values_come_back_from_their_words() -> None:
    values: dict[str, Any] = {"a.x": 1.2345678901234567e-05, "a.y": "1e-4", "b": [64, 64], "c": None, "d": True, "e": 3}
    raw: dict[str, Any] = {}
    override(raw, words_of(values))
    assert raw == {"a": {"x": 1.2345678901234567e-05, "y": "1e-4"}, "b": [64, 64], "c": None, "d": True, "e": 3}


# --- the goal ----------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    return build({"model_fn": dict, "dataset_fn": dict, "loss_fn": "mse_loss", **changes})


def own_loop(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: Any) -> None: ...


def test_the_goal_comes_from_the_config() -> None:
    best = {"metric": "accuracy", "mode": "max"}
    assert pick_goal(config(), None, None) == Goal("val_loss", "min")
    assert pick_goal(config(val_fraction=0), None, None) == Goal("train_loss", "min")
    kept = config(metrics=["accuracy"], checkpoint={"best": best})
    assert pick_goal(kept, None, None) == Goal("accuracy", "max", keeps_best=True)
    assert pick_goal(kept, "val_loss", None) == Goal("val_loss", "min")
    assert pick_goal(config(metrics=["accuracy"]), "accuracy", None) == Goal("accuracy", "max")
    own = build({"model_fn": dict, "dataset_fn": dict, "train_fn": own_loop})
    assert pick_goal(own, None, "min") == Goal("value", "min")


@pytest.mark.parametrize(
    ("metric", "mode", "problem"),
    [
        ("f1", None, "--metric f1 is not measured; use val_loss, train_loss, score, or add it to metrics"),
        ("score", None, "--metric score has no default mode; use --mode min or --mode max"),
        ("score", "up", "--mode up is not known; use --mode min or --mode max"),
    ],
)
def test_an_unknown_metric_or_mode_is_refused(metric: str, mode: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pick_goal(config(metrics={"score": max}), metric, mode)


def test_the_last_epoch_counts_or_the_best_one_where_its_weights_are_kept() -> None:
    history = [{"acc": 0.5}, {"acc": 0.9}, {"acc": None}, {"acc": math.nan}, {"acc": 0.7}]
    assert Goal("acc", "max").value_of(history) == 0.7
    assert Goal("acc", "max", keeps_best=True).value_of(history) == 0.9
    assert Goal("acc", "min", keeps_best=True).value_of(history) == 0.5
    assert math.isnan(Goal("acc", "max").value_of(history[:4]) or 0)
    assert Goal("loss", "min").value_of(history) is None


# --- the machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "gpus", "cores", "shares"),
    [
        (1, ["0", "1"], [0, 1], [MachineShare(None, None)]),
        (2, [], [0, 1, 2], [MachineShare(None, [0]), MachineShare(None, [1])]),
        (2, ["0", "1", "2", "3"], [4, 5, 6, 7], [MachineShare(["0", "1"], [4, 5]), MachineShare(["2", "3"], [6, 7])]),
        (2, ["5", "7", "9"], [0, 1], [MachineShare(["5"], [0]), MachineShare(["7"], [1])]),
        (
            3,
            ["GPU-a"],
            [0, 1],
            [MachineShare(["GPU-a"], [0]), MachineShare(["GPU-a"], [1]), MachineShare(["GPU-a"], [0])],
        ),
        (3, ["0", "1"], [0, 1, 2], [MachineShare(["0"], [0]), MachineShare(["1"], [1]), MachineShare(["0"], [2])]),
    ],
)
def test_trials_side_by_side_get_equal_shares(
    parallel: int, gpus: list[str], cores: list[int], shares: list[MachineShare]
) -> None:
    assert shares_of(parallel, gpus, cores) == shares


# --- the report --------------------------------------------------------------------------------------------------


def row(number: int, value: float | None, state: str = "done", epochs: int = 3, reason: str = "") -> TrialRow:
    return TrialRow(number, {"lr": 0.1 * (number + 1)}, value, state, epochs, 1.0, f"runs/{number}", reason)


ROWS = [row(0, 0.5), row(1, None, "failed", 0, "rank 0 failed\n  OOM\n  more"), row(2, 0.1, "pruned", 1), row(3, 0.2)]


def test_the_best_trial_is_one_that_finished() -> None:
    assert [each.number for each in report.ranking(ROWS, Goal("val_loss", "min"))] == [3, 0, 2, 1]
    assert [each.number for each in report.ranking(ROWS, Goal("accuracy", "max"))] == [0, 3, 2, 1]
    for mode, number in (("min", 3), ("max", 0)):
        best = report.best_of(ROWS, Goal("m", mode))
        assert best is not None
        assert best.number == number
    assert report.best_of(ROWS[1:3], Goal("m", "min")) is None


def test_a_trial_is_described_in_one_line_with_the_reason_of_its_failure() -> None:
    assert ROWS[3].describe(Goal("val_loss", "min")) == "trial 3  done  val_loss 0.2  1.0 s  lr 0.4"
    assert ROWS[1].describe(Goal("val_loss", "min")) == "trial 1  failed  1.0 s  lr 0.2: rank 0 failed OOM"


def test_the_table_has_every_trial(tmp_path: Path) -> None:
    report.write_table(tmp_path / "trials.csv", ROWS, Goal("val_loss", "min"))
    lines = (tmp_path / "trials.csv").read_text().splitlines()
    assert lines[0] == "trial,state,val_loss,epochs,seconds,lr,run_dir,reason"
    assert lines[1] == "0,done,0.5,3,1.0,0.1,runs/0,"
    assert len(lines) == 5


def test_a_config_with_values_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    from paceline.config import dump_yaml

    raw = {"procs": "1:4", "name": "1e-4", "optimizer": {"lr": 1e-05}, "model_args": {"widths": [1, 2]}, "df": None}
    (tmp_path / "config.yaml").write_text(dump_yaml(raw))
    assert read_yaml(tmp_path / "config.yaml") == raw
