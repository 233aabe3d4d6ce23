"""checkpoint/resume.py: which run is resumed, and which changes of its config are allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.resume import (
    RestorePoint,
    check_compatible,
    find_restore_point,
    identity_of,
    named_checkpoint,
)
from paceline.checkpoint.store import Store
from paceline.config import EXECUTION_KEYS, Config
from paceline.errors import ConfigError
from paceline.run import checked_files
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from support.runs import create_run

MakeConfig = Callable[..., Config]
SOURCE = Path("runs/run/a/checkpoints/step-00000003")


def make_run(config: Config, path: str, *, is_finished: bool = False, **settled: int) -> RunFolder:
    """Make a run folder as a launch leaves it, with its resolved lanes and threads."""
    folder = create_run(config.model_copy(update={"run_dir": Path(path), **settled}))
    if is_finished:
        folder.result.write_text("{}")
    return folder


def save(folder: RunFolder, step: int, identity: dict[str, Any]) -> Path:
    store = Store(folder.checkpoints)
    store.partial(step).mkdir(parents=True)
    return store.publish(step, [checked_files.write(store.partial(step) / "state.pt", [b"x"])], identity, {})


# --- which run is resumed ---------------------------------------------------------------------------------------------


def test_by_default_a_run_is_a_new_one(make_config: MakeConfig) -> None:
    make_run(make_config(), "runs/run/2024-01-01_00-00-00", lanes=4)
    assert find_restore_point(make_config()) == RestorePoint()
    assert find_restore_point(make_config(resume="never", run_dir="elsewhere")) == RestorePoint()


def test_auto_resumes_the_folder_that_run_dir_names(make_config: MakeConfig) -> None:
    config = make_config(resume="auto", run_dir="mine")
    assert find_restore_point(config) == RestorePoint()  # the first time
    folder = make_run(config, "mine", lanes=4, threads=2)
    assert find_restore_point(config) == RestorePoint(folder.path, {"lanes": 4, "threads": 2})
    folder.result.write_text("{}")
    assert find_restore_point(config).run_dir == folder.path  # to train for more epochs, for example


def test_auto_resumes_the_newest_unfinished_run_of_that_name(make_config: MakeConfig) -> None:
    config = make_config(resume="auto", name="digits")
    assert find_restore_point(config) == RestorePoint()
    for name, is_finished in (("2024-01-01", False), ("2024-01-02", False), ("2024-01-03", True)):
        make_run(config, f"runs/digits/{name}", is_finished=is_finished, lanes=4)
    make_run(config, "runs/other/2024-01-09", lanes=4)
    assert find_restore_point(config).run_dir == Path("runs/digits/2024-01-02").resolve()


def test_auto_starts_a_new_run_when_all_runs_of_that_name_are_finished(make_config: MakeConfig) -> None:
    config = make_config(resume="auto")
    make_run(config, "runs/run/2024-01-01", is_finished=True)
    Path("runs/run/notes.txt").write_text("no run")
    Path("runs/run/zzz").mkdir()
    assert find_restore_point(config) == RestorePoint()


def test_auto_skips_a_run_that_is_being_trained(make_config: MakeConfig) -> None:
    config = make_config(resume="auto")
    make_run(config, "runs/run/2024-01-01")
    newer = make_run(config, "runs/run/2024-01-02")
    with open_run(config, newer.path):
        assert find_restore_point(config).run_dir == Path("runs/run/2024-01-01").resolve()
    assert find_restore_point(config).run_dir == newer.path


def test_auto_restarts_an_unfinished_own_loop_in_the_folder_that_run_dir_names(make_config: MakeConfig) -> None:
    config = make_config(resume="auto", run_dir="mine", train_fn=lambda *arguments: None, loss_fn=None)
    assert find_restore_point(config) == RestorePoint()
    folder = make_run(config, "mine", threads=2)
    assert find_restore_point(config) == RestorePoint(folder.path, {"lanes": None, "threads": 2})
    folder.result.write_text("{}")
    with pytest.raises(ConfigError, match="run_dir=mine contains a finished run, and a train_fn without `run`"):
        find_restore_point(config)


def test_auto_gives_an_own_loop_without_run_dir_a_new_folder(make_config: MakeConfig) -> None:
    config = make_config(resume="auto", train_fn=lambda *arguments: None, loss_fn=None)
    make_run(config, "runs/run/2024-01-01")
    assert find_restore_point(config) == RestorePoint()


def test_a_path_resumes_that_run_even_if_it_is_finished(make_config: MakeConfig) -> None:
    folder = make_run(make_config(), "old", is_finished=True, lanes=8)
    assert find_restore_point(make_config(resume="old")) == RestorePoint(folder.path, {"lanes": 8, "threads": None})
    assert find_restore_point(make_config(resume="old", run_dir="./old")).run_dir == folder.path


def test_the_path_of_a_checkpoint_starts_a_new_run_with_its_lanes(make_config: MakeConfig) -> None:
    config = make_config()
    identity = identity_of(config, lanes=8, samples=100, device=torch.device("cpu"))
    path = save(make_run(config, "old"), 3, {**identity, "threads": 2})
    point = find_restore_point(make_config(resume=str(path), run_dir="new"))
    assert point.run_dir is None
    assert (point.lanes(config), point.threads(config)) == (8, 2)


def test_only_the_path_of_a_checkpoint_names_it(make_config: MakeConfig) -> None:
    folder = make_run(make_config(), "old")
    path = save(folder, 3, {})
    assert named_checkpoint("old/checkpoints/step-00000003") == path
    for other in ("auto", "never", "old", "old/checkpoints", "nowhere"):
        assert named_checkpoint(other) is None


@pytest.mark.parametrize(
    ("resume", "text"),
    [
        ("nowhere", "resume=nowhere does not exist; give a run folder, a checkpoint in it, auto or never"),
        (
            "empty",
            "resume=empty is neither a run folder nor a checkpoint that can be used: manifest.json is missing",
        ),
        (
            "file.pt",
            "resume=file.pt is neither a run folder nor a checkpoint that can be used: manifest.json cannot be read",
        ),
    ],
)
def test_a_path_without_a_run_is_refused_with_a_hint(resume: str, text: str, make_config: MakeConfig) -> None:
    Path("empty").mkdir()
    Path("file.pt").write_text("")
    with pytest.raises(ConfigError) as caught:
        find_restore_point(make_config(resume=resume))
    assert str(caught.value).startswith(text)


def test_a_damaged_checkpoint_is_refused_by_name(make_config: MakeConfig) -> None:
    path = save(make_run(make_config(), "old"), 3, {"lanes": 4})
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"lanes": 4', '"lanes": 2'))
    with pytest.raises(ConfigError, match=r"manifest\.json has changed since it was written"):
        find_restore_point(make_config(resume=str(path)))


def test_two_folders_for_one_run_conflict(make_config: MakeConfig) -> None:
    make_run(make_config(), "old")
    with pytest.raises(ConfigError, match="resume=old and run_dir=new are different folders; keep one of them"):
        find_restore_point(make_config(resume="old", run_dir="new"))


@pytest.mark.parametrize("content", ["", "- a list", "lanes: [4", b"\xff\xfe\x00"])
def test_a_run_whose_config_cannot_be_read_is_refused_by_name(content: str | bytes, make_config: MakeConfig) -> None:
    folder = make_run(make_config(), "old")
    folder.config.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = r"old/config\.yaml cannot be read, and there is no checkpoint to replace it; give another run folder"
    with pytest.raises(ConfigError, match=text):
        find_restore_point(make_config(resume="old"))


@pytest.mark.parametrize("content", ["", "lanes: [4", None])
def test_a_run_whose_config_is_damaged_is_resumed_by_its_newest_checkpoint(
    content: str | None, make_config: MakeConfig
) -> None:
    folder = make_run(make_config(name="mine"), "runs/mine/2024-01-01_00-00-00")
    save(folder, 3, {"lanes": 2, "threads": 3})
    save(folder, 5, {"lanes": 4, "threads": 1})
    (save(folder, 7, {}) / "manifest.json").write_text("")
    folder.config.unlink()
    if content is not None:
        folder.config.write_text(content)
    point = RestorePoint(folder.path, {"lanes": 4, "threads": 1})
    assert find_restore_point(make_config(resume=str(folder.path))) == point
    assert find_restore_point(make_config(resume="auto", run_dir=str(folder.path))) == point
    assert find_restore_point(make_config(resume="auto", name="mine")) == point


def test_auto_skips_a_run_without_a_readable_config_or_checkpoint(make_config: MakeConfig) -> None:
    good = make_run(make_config(), "runs/mine/2024-01-01_00-00-00", lanes=4)
    make_run(make_config(), "runs/mine/2024-01-02_00-00-00").config.write_text("")
    assert find_restore_point(make_config(resume="auto", name="mine")).run_dir == good.path


def test_a_run_with_an_empty_result_has_not_finished(make_config: MakeConfig) -> None:
    folder = make_run(make_config(), "runs/mine/2024-01-01_00-00-00", lanes=4)
    folder.result.touch()
    assert find_restore_point(make_config(resume="auto", name="mine")).run_dir == folder.path


# --- lanes and threads ------------------------------------------------------------------------------------------------


def test_lanes_are_those_of_the_first_launch(make_config: MakeConfig) -> None:
    point = RestorePoint(settled={"lanes": 8, "threads": 2})
    assert point.lanes(make_config()) == 8
    assert point.lanes(make_config(lanes=8)) == 8
    assert RestorePoint().lanes(make_config()) is None
    assert RestorePoint().lanes(make_config(lanes=2)) == 2


def test_different_lanes_are_refused_with_both_numbers(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="lanes=4 but the run started with lanes=8; omit lanes, or start a new"):
        RestorePoint(settled={"lanes": 8}).lanes(make_config(lanes=4))


def test_threads_of_the_config_take_precedence_over_those_of_the_run(make_config: MakeConfig) -> None:
    point = RestorePoint(settled={"lanes": 8, "threads": 2})
    assert point.threads(make_config()) == 2
    assert point.threads(make_config(threads=1)) == 1
    assert RestorePoint().threads(make_config()) is None


# --- whether checkpoint and config fit --------------------------------------------------------------------------------


def identity(config: Config, **changes: Any) -> dict[str, Any]:
    facts = {"lanes": 4, "samples": 100, "device": torch.device("cpu"), **changes}
    return identity_of(config, **facts)


def test_a_config_that_has_not_changed_fits(make_config: MakeConfig) -> None:
    assert check_compatible(identity(make_config(seed=3)), identity(make_config(seed=3)), SOURCE) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"procs": "1:4"}, {"name": "other"}, {"run_dir": "x"}, {"workers": 2}, {"device": "cpu"}, {"resume": "auto"},
        {"checkpoint": {"every_steps": 5}}, {"time_limit": 60}, {"max_restarts": 9}, {"log": {"every_steps": 3}},
        {"ddp": False}, {"bucket_mb": 3}, {"hang_timeout_s": 5}, {"nan_limit": 3},
    ],
    ids=lambda keys: next(iter(keys)),
)  # fmt: skip
def test_changes_of_how_and_where_a_run_is_executed_are_not_reported(
    keys: dict[str, Any], make_config: MakeConfig
) -> None:
    assert check_compatible(identity(make_config()), identity(make_config(**keys)), SOURCE) == []


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({"num_epochs": 2}, {"num_epochs": 5}, "num_epochs 2 → 5"),
        ({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.2}}, "optimizer.lr 0.1 → 0.2"),
        ({}, {"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay None → 0.5"),
        ({"clip_norm": 1.0}, {}, "clip_norm 1.0 → None"),
        ({"precision": "fp32"}, {"precision": "bf16"}, "precision fp32 → bf16"),
        ({"model_args": {"p": 0.1}}, {"model_args": {"p": 0.2}}, "model_args.p 0.1 → 0.2"),
    ],
)
def test_allowed_changes_are_reported(
    before: dict[str, Any], after: dict[str, Any], change: str, make_config: MakeConfig
) -> None:
    assert check_compatible(identity(make_config(**before)), identity(make_config(**after)), SOURCE) == [change]


def test_changes_of_device_and_versions_are_reported(make_config: MakeConfig) -> None:
    then = {**identity(make_config(), device=torch.device("cuda")), "versions": {"python": "3.9.0", "torch": "1.0"}}
    changes = check_compatible(then, identity(make_config()), SOURCE)
    assert [change.partition(" ")[0] for change in changes] == ["device", "versions.python", "versions.torch"]
    assert changes[0] == "device cuda → cpu"


@pytest.mark.parametrize(
    ("before", "after", "key", "values"),
    [
        ({"batch_size": 4}, {"batch_size": 8}, "batch_size", (4, 8)),
        ({"seed": 1}, {"seed": 2}, "seed", (1, 2)),
        ({"ema": 0.9}, {"ema": 0.99}, "ema", (0.9, 0.99)),
        ({}, {"ema": 0.99}, "ema", (None, 0.99)),
    ],
)
def test_changes_that_alter_the_meaning_of_a_step_are_refused(
    before: dict[str, Any], after: dict[str, Any], key: str, values: tuple[Any, Any], make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_compatible(identity(make_config(**before)), identity(make_config(**after)), SOURCE)
    assert caught.value.problems == [
        f"{key}={values[1]} but {SOURCE} was saved with {key}={values[0]}; "
        "use that value, or start a new run with --resume never"
    ]


def test_all_refused_changes_are_reported_together(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        check_compatible(identity(make_config(seed=1)), identity(make_config(seed=2), lanes=8, samples=101), SOURCE)
    assert [problem.partition("=")[0] for problem in caught.value.problems] == ["seed", "lanes", "samples"]


def test_an_identity_read_from_a_manifest_is_unchanged(make_config: MakeConfig) -> None:
    odd = {3: "three", 20: {"x": math.inf}, "a": None, (0, 1): [{True: 1}]}
    config = make_config(model_args={"sizes": (1, 2), "odd": odd, "act": torch.relu}, dataset_args={"path": Path("a")})
    folder = make_run(config, "run")
    store = Store(folder.checkpoints)
    save(folder, 3, identity(config))
    found = store.newest_valid(pytest.fail)
    assert found is not None
    assert check_compatible(found[1].identity, identity(config), SOURCE) == []


def test_every_execution_key_is_a_config_key() -> None:
    assert set(Config.model_fields) >= EXECUTION_KEYS
