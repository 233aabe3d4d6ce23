"""Loading a run from its folder in another program. No rank is started."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import paceline
from paceline import cli
from paceline.checkpoint.state import capture
from paceline.config import build
from paceline.config.functions import resolve
from paceline.engine.digest import sha256_of
from paceline.engine.ema import Ema
from paceline.errors import ConfigError
from paceline.observe.events import Events
from paceline.run.layout import RunFolder
from paceline.worker.result import write_result
from support.runs import create_run, save_checkpoint

LAB = """
import torch
from torch.utils.data import TensorDataset
def get_model(width=2): return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
def get_dataset(*tables): return TensorDataset(torch.zeros(4, 2), torch.zeros(4))
"""
KEYS = {"model_fn": "pl_lab:get_model", "dataset_fn": "pl_lab:get_dataset", "loss_fn": "mse_loss"}
FACTS = {"metrics": {"val_loss": 0.5}, "history": [], "step": 9, "epoch": 1, "world_size": 1, "lanes": 2}


pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """Creates the folder of a run whose functions are in the folder `lab`; nothing is trained."""
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "pl_lab.py").write_text(LAB)

    def make(**keys: Any) -> RunFolder:
        return create_run(build({**KEYS, "run_dir": tmp_path / "run", **keys}, folder=lab))

    return make


def make_model(fill: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for tensor in (*model.parameters(), model[1].running_mean):
        nn.init.constant_(tensor, fill)
    return model


def finish(folder: RunFolder, fill: float, ema: float | None = None) -> None:
    """Write a result with weights of one value, and averages of another."""
    model, facts = make_model(fill), {**FACTS, "optimizer_sha256": None, "seconds": 1.0, "samples": 8}
    write_result(folder, model, None if ema is None else average(model, ema), None, **facts)


def average(model: nn.Module, fill: float) -> Ema:
    follower = Ema(model, 0.9)
    for tensor in follower.averages().values():
        nn.init.constant_(tensor, fill)
    return follower


def save(folder: RunFolder, step: int, fill: float, ema: float | None = None, **metrics: float) -> Path:
    """Publish a checkpoint with weights of one value, and averages of another."""
    model = make_model(fill)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = capture(model, optimizer, None if ema is None else average(model, ema), {})
    return save_checkpoint(folder, step, state, {}, metrics)


def value_of(run: Any) -> float:
    [value] = {parameter.item() for parameter in run.model.parameters() for parameter in parameter.flatten()}
    return value


# --- which weights --------------------------------------------------------------------------------------------


def test_a_finished_run_is_loaded_with_its_last_weights_in_eval_mode(make_run) -> None:
    folder = make_run(model_args={"width": 2}, lanes=2, threads=3)
    finish(folder, 1.5)
    run = paceline.load(folder.path)
    assert sha256_of(run.model.state_dict()) == sha256_of(make_model(1.5).state_dict())
    assert not run.model.training
    assert (run.step, run.lanes, run.metrics, run.origin) == (9, 2, {"val_loss": 0.5}, "step 9 (last)")
    assert (run.config.threads, run.config.model_args) == (3, {"width": 2})


def test_averages_are_used_if_the_run_has_them_and_buffers_are_kept(make_run) -> None:
    folder = make_run(ema=0.9)
    finish(folder, 1.0, ema=2.0)
    save(folder, 3, 3.0, ema=4.0)
    last, third = paceline.load(folder.path), paceline.load(folder.path, 3)
    assert (value_of(last), value_of(third)) == (2.0, 4.0)
    assert third.model[1].running_mean.tolist() == [3.0, 3.0]
    assert last.origin == "step 9 (last), the average of the weights (ema)"
    assert third.origin == "step 3, the average of the weights (ema)"


def test_the_best_checkpoint_is_the_default_if_the_run_kept_one(make_run) -> None:
    folder = make_run(checkpoint={"best": {"metric": "val_loss"}})
    finish(folder, 1.0)
    for step, loss in ((3, 0.7), (6, 0.2), (9, 0.4)):
        save(folder, step, step, val_loss=loss)
    best = paceline.load(str(folder.path))
    assert (value_of(best), best.step, best.metrics) == (6.0, 6, {"val_loss": 0.2})
    assert best.origin == "step 6 (best by val_loss)"
    assert value_of(paceline.load(folder.path, "best")) == 6.0
    assert value_of(paceline.load(folder.path, "last")) == 1.0
    assert value_of(paceline.load(folder.path, "3")) == 3.0


def test_an_unfinished_run_is_loaded_from_its_last_checkpoint(make_run) -> None:
    folder = make_run()
    with pytest.raises(ConfigError, match=r"checkpoint=last is not in .*; the run has no result and no checkpoint"):
        paceline.load(folder.path)
    save(folder, 3, 3.0)
    save(folder, 6, 6.0)
    run = paceline.load(folder.path)
    assert (value_of(run), run.origin) == (6.0, "step 6 (last so far)")


def test_a_missing_checkpoint_lists_the_available_ones(make_run) -> None:
    folder = make_run()
    finish(folder, 1.0)
    save(folder, 3, 3.0)
    for wanted in (4, "best", "first"):
        with pytest.raises(ConfigError, match=f"checkpoint={wanted} is not in {folder.path}; choose from last, 3$"):
            paceline.load(folder.path, wanted)


def test_a_damaged_checkpoint_is_not_used(make_run) -> None:
    folder = make_run()
    weights = save(folder, 3, 3.0) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with pytest.raises(ConfigError, match=r"step-00000003 cannot be used: weights\.safetensors has a wrong"):
        paceline.load(folder.path, 3)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ema", [None, 2.0])
def test_last_weights_with_one_wrong_bit_are_not_used(make_run, ema: float | None) -> None:
    folder = make_run(ema=0.9 if ema else None)
    finish(folder, 1.0, ema=ema)
    weights = folder.weights if ema is None else folder.ema
    flip_last_bit(weights)
    expected = f"{weights} cannot be used: its weights have another checksum than when they were written; "
    with pytest.raises(ConfigError, match=f"^{expected}the run has no checkpoint; train it again$"):
        paceline.load(folder.path)
    save(folder, 3, 3.0, ema=ema and 4.0)
    with pytest.raises(ConfigError, match=f"^{expected}choose another with --checkpoint: 3$"):
        paceline.load(folder.path)
    assert value_of(paceline.load(folder.path, 3)) == (3.0 if ema is None else 4.0)


def test_truncated_or_missing_last_weights_are_not_used(make_run) -> None:
    folder = make_run()
    finish(folder, 1.0)
    folder.weights.write_bytes(folder.weights.read_bytes()[:-4])
    with pytest.raises(
        ConfigError, match=r"weights\.safetensors cannot be used: it cannot be read \(.*; train it again"
    ):
        paceline.load(folder.path)
    folder.weights.unlink()
    with pytest.raises(ConfigError, match=r"it cannot be read \(No such file"):
        paceline.load(folder.path)


@pytest.mark.parametrize("tie", ["self.a.weight", "torch.nn.Parameter(self.a.weight.detach().view(1, 9))"])
def test_tied_weights_are_loaded_tied(make_run, tmp_path: Path, tie: str) -> None:
    (tmp_path / "lab" / "pl_tied.py").write_text(
        "import torch\nclass Tied(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)\n        self.b.weight = {tie}\n"
    )
    folder = make_run(model_fn="pl_tied:Tied")
    model = resolve("pl_tied:Tied", tmp_path / "lab")()
    write_result(folder, model, None, None, **FACTS, optimizer_sha256=None, seconds=1.0, samples=8)
    assert sha256_of(paceline.load(folder.path).model.state_dict()) == sha256_of(model.state_dict())
    flip_last_bit(folder.weights)
    with pytest.raises(ConfigError, match="another checksum"):
        paceline.load(folder.path)


def test_weights_that_do_not_fit_the_model_are_reported_in_one_sentence(make_run, tmp_path: Path) -> None:
    folder = make_run()
    finish(folder, 1.0)
    save(folder, 3, 3.0)
    (tmp_path / "wide.yaml").write_text("model_args: {width: 5}\n")
    for checkpoint in ("last", 3):
        run = paceline.load(folder.path, checkpoint, config=tmp_path / "wide.yaml")
        with pytest.raises(
            ConfigError, match=r"does not fit the model: .*0\.weight.*; use the model that was trained$"
        ):
            run.load_model()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a run folder; give one, such as runs/NAME/DATE-TIME"):
        paceline.load("nowhere")


# --- functions and data ---------------------------------------------------------------------------------------


def test_missing_functions_of_a_script_are_reported_only_if_needed(make_run) -> None:
    folder = make_run(loss_fn=nn.MSELoss(), optimizer_fn=lambda model: None, metrics={"mine": lambda output, target: 0})
    finish(folder, 1.0)
    run = paceline.load(folder.path)
    assert value_of(run) == 1.0
    with pytest.raises(ConfigError) as caught:
        run.evaluate()
    [problem] = caught.value.problems
    assert problem.startswith("loss_fn=torch.nn.modules.loss:MSELoss(), metrics.mine=")
    assert "cannot be found outside the script or notebook of the run; use result.evaluate()" in problem
    assert "optimizer_fn" not in problem


def test_a_given_config_replaces_what_the_run_cannot_name(make_run, tmp_path: Path) -> None:
    folder = make_run(model_fn=lambda layer: None, model_args={"layer": torch.zeros(2)}, loss_fn=nn.MSELoss())
    finish(folder, 1.0)
    with pytest.raises(ConfigError, match=r"model_args\.layer=<Tensor> cannot be found outside the script"):
        paceline.load(folder.path).load_model()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pl_other.py").write_text(LAB)
    (tmp_path / "other" / "extra.yaml").write_text(
        'model_fn: "pl_other:get_model"\nmodel_args: {}\nloss_fn: l1_loss\nmetrics: [mae]\n'
    )
    run = paceline.load(folder.path, config=tmp_path / "other" / "extra.yaml")
    assert value_of(run) == 1.0
    assert run.config.loss_fn is nn.functional.l1_loss
    assert (run.config.metrics, run.config.function("dataset_fn").__module__) == (["mae"], "pl_lab")


def test_functions_replaced_by_a_given_config_are_not_imported(make_run, tmp_path: Path) -> None:
    folder = make_run()
    finish(folder, 1.0)
    folder.config.write_text(folder.config.read_text().replace("pl_lab:get_model", "pl_twin:get_model"))
    (tmp_path / "lab" / "pl_twin.py").write_text("def get_model(): raise RuntimeError\n")
    (tmp_path / "pl_twin.py").write_text(LAB)
    (tmp_path / "extra.yaml").write_text('model_fn: "pl_twin:get_model"\ndataset_fn: "pl_twin:get_dataset"\n')
    sys.path.remove(str(tmp_path / "lab"))
    assert value_of(paceline.load(folder.path, config=tmp_path / "extra.yaml")) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics: [acuracy]", "metrics='acuracy' is not known"),
        ("bach_size: 3", "bach_size is not a known key; did you mean batch_size?"),
        ("model_fn: pl_lab:get_modl", "model_fn=pl_lab:get_modl names get_modl, which module pl_lab does not have"),
    ],
)
def test_mistakes_in_a_given_config_are_reported(make_run, tmp_path: Path, text: str, expected: str) -> None:
    folder = make_run()
    finish(folder, 1.0)
    (tmp_path / "lab" / "extra.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        paceline.load(folder.path, config=tmp_path / "lab" / "extra.yaml").evaluate()
    assert expected in str(caught.value)


def test_missing_data_must_be_given(make_run, tmp_path: Path) -> None:
    table = tmp_path / "lab" / "data.csv"
    table.write_text("x\n1\n")
    folder = make_run(df="data.csv", val_df=pd.DataFrame({"x": [1]}))
    finish(folder, 1.0)
    table.unlink()
    with pytest.raises(ConfigError) as caught:
        paceline.load(folder.path).predict()
    assert caught.value.problems == [
        f"df={table} no longer exists; pass the data to use (--data)",
        "val_df=<DataFrame> was given in memory and is not in the run folder; pass the data to use (--data)",
    ]


def test_a_run_without_validation_data_asks_for_data(make_run) -> None:
    folder = make_run(val_fraction=0)
    finish(folder, 1.0)
    with pytest.raises(ConfigError, match="the run has no validation data; pass the data to use"):
        paceline.load(folder.path).evaluate()


@pytest.mark.parametrize("is_here_writable", [True, False])
def test_a_read_only_run_is_used_from_the_working_folder(
    make_run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_here_writable: bool,
) -> None:
    folder = make_run(name="lab")
    finish(folder, 1.0)
    plain = Path.mkdir

    def make(path: Path, *arguments: Any, **options: Any) -> None:
        if path.is_relative_to(folder.path) or not is_here_writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        plain(path, *arguments, **options)

    used: list[Path] = []
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(
        "paceline.launch.start",
        lambda config, task, home: used.append(config.run_dir) or SimpleNamespace(load_value=lambda: {"val_loss": 0.5}),
    )
    run = paceline.load(folder.path)
    if not is_here_writable:
        with pytest.raises(
            ConfigError, match=f"^neither {folder.path} nor {tmp_path} can be written to; change to a writable folder"
        ):
            run.evaluate()
        return
    assert run.evaluate() == {"val_loss": 0.5}
    assert used[0].parent == tmp_path / "runs" / "lab" / "evaluate"
    assert capsys.readouterr().err == f"{folder.path} cannot be written to; logs are in {used[0]}\n"


# --- the commands' own mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["evaluate", "run", "--checkpoint", "7"], "checkpoint=7 is not in"),
        (["evaluate", "run", "--data", "gone.csv"], "gone.csv does not exist; give a CSV or Parquet file"),
        (["predict", "run", "--out", "p.txt"], "--out p.txt must end in .csv or .parquet"),
        (["predict", "run", "--out", "no/p.csv"], "--out no/p.csv is in a folder that does not exist"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_sentence(
    make_run, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.setattr("paceline.launch.prepare", lambda raw, folder: None)
    finish(make_run(), 1.0)
    with pytest.raises(ConfigError) as caught:
        cli.app(words, standalone_mode=False)
    [problem] = caught.value.problems
    assert expected in problem


# --- whose code it is -----------------------------------------------------------------------------------------


def test_a_run_that_was_moved_is_used_only_with_trust(make_run, tmp_path: Path) -> None:
    folder = make_run(metrics={"mine": "pl_lab:get_dataset"})
    finish(folder, 1.0)
    (tmp_path / "lab" / ".env").write_text("A=1")
    moved = folder.path.rename(tmp_path / "moved")
    with pytest.raises(ConfigError) as caught:
        paceline.load(moved)
    lab = tmp_path / "lab"
    sentence, *code = str(caught.value).splitlines()
    assert sentence == (
        f"{moved} was moved or copied from {folder.path}, and using it executes the code below; "
        f"check it, then call paceline.load({str(moved)!r}, …, trust=True)"
    )
    assert code == [
        f"  model_fn: 'pl_lab:get_model' in {lab / 'pl_lab.py'}",
        f"  dataset_fn: 'pl_lab:get_dataset' in {lab / 'pl_lab.py'}",
        f"  loss_fn: 'torch.nn.functional:mse_loss' in {nn.functional.__file__}",
        f"  metrics.mine: 'pl_lab:get_dataset' in {lab / 'pl_lab.py'}",
        f"  environment variables in {lab / '.env'}",
    ]
    assert value_of(paceline.load(moved, trust=True)) == 1.0


@pytest.mark.parametrize("place", ["runs/mine", "/proc/self/cwd/runs/mine"])
def test_a_recorded_path_that_depends_on_the_process_is_not_trusted(make_run, tmp_path: Path, place: str) -> None:
    folder = make_run()
    finish(folder, 1.0)
    (tmp_path / "runs").mkdir(exist_ok=True)
    moved = folder.path.rename(tmp_path / "runs" / "mine")
    with closing(Events(RunFolder(moved).events)) as events:
        events.write("run_started", run_dir=place)
    with pytest.raises(ConfigError, match=f"was moved or copied from {place}"):
        paceline.load(Path("runs/mine"))


def test_a_run_that_was_moved_and_resumed_there_is_trusted(make_run, tmp_path: Path) -> None:
    folder = make_run()
    finish(folder, 1.0)
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    with closing(Events(moved.events)) as events:
        events.write("run_started", run_dir=str(moved.path))
    assert value_of(paceline.load(moved.path)) == 1.0


def test_a_run_that_does_not_record_its_path_is_not_trusted(make_run) -> None:
    folder = make_run()
    finish(folder, 1.0)
    folder.config.write_text(folder.config.read_text().replace(f"run_dir: {folder.path}\n", ""))
    with pytest.raises(ConfigError, match="does not record where it was trained, and using it executes"):
        paceline.load(folder.path)


@pytest.mark.parametrize(
    "command", [["evaluate"], ["predict", "--out", "p.csv"], ["export", "--format=torch", "--to=x"]]
)
def test_code_of_another_user_is_listed_and_not_executed(
    make_run, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run()
    finish(folder, 1.0)
    folder.config.write_text(folder.config.read_text().replace("pl_lab:get_model", "pl_evil:strike"))
    (tmp_path / "lab" / "pl_evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    (tmp_path / "lab" / ".env").write_text("PL_EVIL=1")
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    arguments = [*command, str(folder.path)]
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(ConfigError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert "belongs to the user" in str(caught.value)
    assert f"check it, then run: paceline {shlex.join(arguments)} --trust\n" in str(caught.value)
    assert f"model_fn: 'pl_evil:strike' in {tmp_path / 'lab' / 'pl_evil.py'}" in str(caught.value)
    assert not (tmp_path / "executed").exists()
    assert "PL_EVIL" not in os.environ


def test_functions_of_a_given_config_are_not_listed(make_run, tmp_path: Path) -> None:
    folder = make_run()
    finish(folder, 1.0)
    moved = folder.path.rename(tmp_path / "moved")
    other = tmp_path / "other.yaml"
    other.write_text("model_fn: pl_lab:get_model\nfolder: lab\n")
    with pytest.raises(ConfigError) as caught:
        paceline.load(moved, config=other)
    assert "model_fn" not in str(caught.value)
    assert "dataset_fn" in str(caught.value)
