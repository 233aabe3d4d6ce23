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


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_the_documentation_runs_and_gives_one_hash(program: Path, tmp_path: Path) -> None:
    alone, two = (run(program, procs, tmp_path / str(procs)) for procs in (1, 2))
    assert alone, "it prints nothing"
    assert [line for line in two if line.startswith("hash ")] == [line for line in alone if line.startswith("hash ")]


def test_weights_find_the_rare_class(tmp_path: Path) -> None:
    [program] = [path for path in PROGRAMS if path.stem == "imbalanced"]
    words = run(program, 1, tmp_path / "run")[0].replace(",", "").split()
    without, with_weights = float(words[3]), float(words[6])
    assert without < 0.4
    assert with_weights > 0.7
