"""The programs of the documentation run as they are, and print the same hash on one process and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "programs").glob("*.py"))


def run(program: Path, procs: int, folder: Path) -> list[str]:
    """What a program prints on this number of processes, in a folder of its own."""
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, program, str(procs)], cwd=folder, check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


def hashes_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("hash ")]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_the_documentation_runs_and_gives_one_hash(program: Path, tmp_path: Path) -> None:
    two = run(program, 2, tmp_path / "2")
    assert two, "it prints nothing"
    if hashes_in(two):
        assert hashes_in(run(program, 1, tmp_path / "1")) == hashes_in(two)
    if program.stem == "imbalanced":
        assert_that_weights_find_the_rare_class(two[0])


def assert_that_weights_find_the_rare_class(line: str) -> None:
    words = line.replace(",", "").split()
    without, with_weights = float(words[3]), float(words[6])
    assert without < 0.4
    assert with_weights > 0.7


STOPPED = """
import torch
from paceline import Trainer


def train(model, train_loader, val_loader, device, num_epochs, run):
    for _ in run.epochs(num_epochs):
        for _ in train_loader:
            run.stop("enough")


data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
Trainer(model_fn=lambda: torch.nn.Linear(2, 2), dataset_fn=lambda: data, train_fn=train, num_epochs=3).start()
"""


def test_a_script_whose_run_is_stopped_says_why_and_how_to_resume(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(STOPPED)
    ended = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 3
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("paceline: stopped by enough at step 1; checkpoint saved; resume with --resume /")
    assert last.endswith('or with Trainer(…, resume="auto")')
