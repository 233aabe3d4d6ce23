"""`paceline train` as a user types it: recipes, configs, overrides, mistakes."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import yaml

from paceline import __version__
from paceline.cli import COMMANDS

BIN = Path(sys.executable).parent


def result_of(output: str) -> dict:
    folder = next(line.removeprefix("run folder: ") for line in output.splitlines() if line.startswith("run folder: "))
    return json.loads((Path(folder) / "result.json").read_text())


def write_lab(folder: Path) -> None:
    """A config with its module beside it."""
    (folder / "lab_functions.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        def get_model(width=4): return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
        def get_dataset():
            x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
            return TensorDataset(x, (x.sum(1) > 0).long())
        def broken_train(model, train_loader, val_loader, device, num_epochs):
            raise ArithmeticError("two and two")
        """)
    )
    (folder / "config.yaml").write_text(
        textwrap.dedent("""
        name: lab
        model_fn: "lab_functions:get_model"
        dataset_fn: "lab_functions:get_dataset"
        loss_fn: cross_entropy
        optimizer: {name: adam, lr: 1e-4}
        batch_size: 8
        num_epochs: 1
        """)
    )


def test_the_digits_recipe_reaches_96_percent_and_suggests_next_commands(run) -> None:
    ended = run("paceline", "train", "digits", "--procs", "2")
    assert ended.returncode == 0, ended.stderr
    result = result_of(ended.stdout)
    assert result["metrics"]["accuracy"] >= 0.96
    assert result["world_size"] == 2
    assert "epoch 10" in ended.stderr  # progress
    assert "try next:" in ended.stdout


def test_overrides_change_the_config_and_are_kept_in_the_run_folder(run, tmp_path: Path) -> None:
    write_lab(tmp_path)
    ended = run(
        "paceline", "train", "config.yaml", "batch_size=16", "optimizer.lr=3e-4", "model_args.width=6", "--procs", "2",
        "--run-dir", "out/here",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    kept = yaml.safe_load((tmp_path / "out" / "here" / "config.yaml").read_text())
    assert kept["batch_size"] == 16
    assert kept["optimizer"] == {"name": "adam", "lr": 3e-4}
    assert kept["model_args"] == {"width": 6}
    assert kept["procs"] == 2
    assert result_of(ended.stdout)["step"] == 2  # 36 training samples in steps of 2 × 16 make two


def test_all_mistakes_are_reported_together_without_a_traceback(run, tmp_path: Path) -> None:
    write_lab(tmp_path)
    ended = run(
        "paceline", "train", "config.yaml", "bach_size=16", "optimizer.name=adamm", "num_epochs=0",
        "schedule.nam=cosine", "loss_fn=cross_entrpy", "model_fn=lab_functions:get_modl", "metrics=[acuracy]",
        "clip_norm=fast",
    )  # fmt: skip
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for word in (
        "bach_size is not a known key; did you mean batch_size?",
        "optimizer.name='adamm' is not an optimizer of torch.optim; did you mean adam?",
        "num_epochs=0",
        "did you mean schedule.name?",
        "loss_fn='cross_entrpy'",
        "did you mean cross_entropy?",
        "did you mean get_model?",
        "metrics='acuracy'",
        "clip_norm='fast'",
    ):
        assert word in ended.stderr, word
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digitz"], "did you mean digits?"),
        (["missing.yaml"], "neither a file nor a recipe"),
        (["main.py"], "main.py is a script, not a config; run it with: python main.py"),
        (["digits", "batch_size"], "is not key=value"),
        (["digits", "--procs", "none"], "procs='none' must be a number of processes, or least:most such as 1:4"),
        (["digits", "--resume", "nowhere"], "resume=nowhere does not exist"),
        (["digits", "lanes=3", "--procs", "4"], "lanes=3 cannot be split over 4 ranks"),
        (["digits", "device=cpu", "backend=nccl"], "backend=nccl needs a GPU, but device=cpu"),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2(run_here, words: list[str], message: str) -> None:
    ended = run_here("paceline", "train", *words)
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr


def test_a_missing_device_is_reported_before_a_run_starts(run, tmp_path: Path) -> None:
    ended = run("paceline", "train", "digits", "device=cuda", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert "device=cuda but torch finds no GPU" in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_a_failed_training_ends_with_exit_code_1_and_a_short_block(run, tmp_path: Path) -> None:
    write_lab(tmp_path)
    (tmp_path / "own.yaml").write_text(
        'model_fn: "lab_functions:get_model"\ndataset_fn: "lab_functions:get_dataset"\n'
        'train_fn: "lab_functions:broken_train"\n'
    )
    ended = run("paceline", "train", "own.yaml", "--procs", "2")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "ArithmeticError: two and two" in ended.stderr
    assert f"{tmp_path / 'lab_functions.py'}:" in ended.stderr


def test_a_mistake_that_only_a_rank_can_see_ends_with_exit_code_2_and_one_sentence(run, tmp_path: Path) -> None:
    write_lab(tmp_path)
    ended = run("paceline", "train", "config.yaml", "model_fn=builtins:dict", "--procs", "2")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "paceline: model_fn returned a dict; it must return a torch.nn.Module"
    assert "full log" not in ended.stderr


def test_help_does_not_import_torch(run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for words in (["--help"], ["train", "--help"], ["init", "--help"]):
        ended = run("paceline", *words, PYTHONPATH=str(tmp_path))
        assert ended.returncode == 0, ended.stderr
        assert "Usage" in ended.stdout
    assert run("paceline", "train", "digits", PYTHONPATH=str(tmp_path)).returncode != 0  # the trap works


def test_the_list_of_commands_fits_80_columns_and_the_version_is_shown(run) -> None:
    ended = run("paceline", "--help", COLUMNS="80")
    commands = ended.stdout.partition("Commands:\n")[2].splitlines()
    assert len(commands) == len({words.split()[0] for words in COMMANDS})
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), ended.stdout
    versions = f"paceline {__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    assert run("paceline", "--version").stdout == versions


def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path: Path) -> None:
    command = [str(BIN / "paceline"), "train", "digits", "num_epochs=10000", "--run-dir", "here"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    events = tmp_path / "here" / "events.jsonl"
    while not (events.exists() and '"step"' in events.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "SIGINT: saving and stopping; Ctrl-C again ends at once" in errors
    assert f"checkpoint saved; resume with --resume {tmp_path / 'here'}" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_while_torch_is_still_imported_ends_with_exit_code_3(
    run, tmp_path: Path, number: signal.Signals
) -> None:
    write_lab(tmp_path)
    # In place of torch: the launcher asks itself to stop, then imports the real one.
    (tmp_path / "first" / "torch").mkdir(parents=True)
    (tmp_path / "first" / "torch" / "__init__.py").write_text(
        textwrap.dedent(f"""
        import os, sys
        if sys.argv[1:2] == ["train"]:
            os.kill(os.getpid(), {number.value})
        del sys.modules["torch"]
        sys.path = [path for path in sys.path if not path.endswith("first")]
        import torch
        """)
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "first"), os.environ.get("PYTHONPATH")]))
    ended = run("python", "-m", "paceline", "train", "config.yaml", PYTHONPATH=path)
    assert ended.stderr.splitlines()[-1] == f"paceline: stopped by {number.name} before it started"
    assert ended.returncode == 3
    assert not (tmp_path / "runs").exists()


def test_a_run_does_not_fail_if_the_reader_of_its_output_ends(tmp_path: Path) -> None:
    command = f"{BIN / 'paceline'} train digits num_epochs=1 --run-dir here 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert (tmp_path / "here" / "result.json").exists()
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_folder_means_the_config_in_it(run, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    write_lab(tmp_path / "lab")
    assert run("paceline", "train", "lab").returncode == 0
    ended = run("paceline", "train", "lab", "--run-dir", "/proc/nowhere")
    assert ended.returncode == 2
    assert "run_dir=/proc/nowhere cannot be created" in ended.stderr
