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
