"""Benchmarks that need a GPU for their figures run on a CPU with tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_large_models_measures_a_loop_by_hand_and_paceline_with_tiny_models(
    run_in: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    ended = run_in(
        tmp_path, "python", str(BENCHMARKS / "large_models.py"), "--tiny", "--models", "gpt2", "--feeds", "loader",
        "--only", "eager,paceline", "--repeats", "1", "--json", "out.json", PYTHONWARNINGS="default",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["eager", "paceline"], ended.stdout
    assert all(row["samples_per_s"] and row["memory_gb"] > 0 for row in rows), ended.stdout
    assert rows[1]["hashes"][0][:12] in ended.stdout


def test_reduction_measures_times_and_memory_of_two_ranks(run_in: Callable[..., Any], tmp_path: Path) -> None:
    ended = run_in(
        tmp_path, "python", str(BENCHMARKS / "reduction.py"), "--procs", "2", "--mb", "1", "--json", "out.json"
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["kind"] for row in rows["times"]] == ["bare collective", "training step"]
    one_lane, *_, four_lanes = rows["memory"]
    assert one_lane["finished"] == one_lane["rounding"] == 0 < one_lane["scratch"] <= 2.1 * one_lane["gradients"]
    assert four_lanes["finished"] == 3 * four_lanes["gradients"]
