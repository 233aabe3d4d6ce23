"""Cases of the exactness matrix on several NCCL ranks that share one GPU, as CUDA graphs and kernel by kernel."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.nccl import AS_HOST
from support.runs import warnings_in

CASES_FILE = Path(__file__).parents[1] / "multi" / "exactness_cases.py"
CASES = [
    "convolution, BatchNorm and dropout", "AdamW", "AdamW, sharded", "Muon, sharded",
    "gradual unfreezing by steps, sharded", "a size that is a multiple of nothing",
    "sum and count", "samples that are not finite", "two phases", "own loop", "own loop with everything",
    "everything at once",
]  # fmt: skip
# An epoch has three full steps, and a step in DDP is recorded after eleven; sharded steps and phases never are.
RECORDED = [
    "convolution, BatchNorm and dropout", "AdamW", "sum and count", "samples that are not finite", "everything at once",
]  # fmt: skip
RECORDED_EPOCHS = 6
COMPILED = ["convolution, BatchNorm and dropout", "AdamW, sharded", "sum and count"]
MANY = [
    "everything at once",
    "AdamW, sharded",
    "own loop with everything",
]  # for eight ranks, which take turns on a GPU
LANES = 8
LIMIT_S = 500
SCRIPT = (
    AS_HOST
    + """
import runpy, sys

sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
)


def train(
    folder: Path, ranks: int, step_mode: str, cases: list[str] = CASES, lanes: int = LANES, **options: Any
) -> dict[str, Any]:
    """The outcomes of these cases on this number of ranks."""
    (folder / "as_hosts.py").write_text(SCRIPT)
    out = folder / f"{ranks}-{step_mode}.json"
    options = {"device": "cuda", "lanes": lanes, "batch_size": 3, "step_mode": step_mode, **options}
    # Warnings are no errors here: torch's compiler has some of its own.
    variables = {"PACELINE_CASES": json.dumps(options), "PACELINE_ONLY": json.dumps(cases), "PYTHONWARNINGS": "default"}
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         "as_hosts.py", CASES_FILE, out],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
        start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = started.communicate(timeout=LIMIT_S)
        assert started.returncode == 0, failure_of(folder, errors)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not finished after {LIMIT_S} s; {failure_of(folder, '')}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # ranks that outlive torchrun would slow down the next test
    outcomes: dict[str, Any] = json.loads(out.read_text())
    assert list(outcomes) == cases
    return outcomes


def failure_of(folder: Path, errors: str) -> str:
    """Each rank's last lines in the log of the last run, below the first errors on the screen."""
    logs = sorted(folder.glob("runs/*/*/logs/rank-*.log"), key=lambda path: (path.parent, path.name))
    last = [path for path in logs if path.parent == logs[-1].parent]
    ends = [f"{path.parents[1].name} {path.name}: {path.read_text()[-1500:]}" for path in last]
    return "\n".join([errors_in(errors), *ends])


def errors_in(log: str) -> str:
    """The first lines that name an error, with what follows each; torchrun's own summary is at the end of a log."""
    lines = log.splitlines()
    found = [place for place, line in enumerate(lines) if re.search(r"\b\w+(Error|Failed|Warning|Exception)\b: ", line)]
    return "\n".join("\n".join(lines[place : place + 4]) for place in found[:6]) or log[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("alone"), 1, "eager")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (3, CASES), (4, CASES), (5, CASES), (8, MANY)])
def test_nccl_ranks_have_the_bits_of_one(tmp_path: Path, alone: dict[str, Any], ranks: int, cases: list[str]) -> None:
    assert train(tmp_path, ranks, "eager", cases) == {case: alone[case] for case in cases}


@pytest.fixture(scope="module")
def long_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("long-alone"), 1, "eager", RECORDED, num_epochs=RECORDED_EPOCHS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_recorded_steps_of_nccl_ranks_have_the_bits_of_one(
    tmp_path: Path, long_alone: dict[str, Any], ranks: int
) -> None:
    assert train(tmp_path, ranks, "graph", RECORDED, num_epochs=RECORDED_EPOCHS) == long_alone
    assert not [text for path in tmp_path.glob("runs/*/*") for text in warnings_in(path) if "CUDA graphs" in text]


@pytest.fixture(scope="module")
def compiled_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("compiled-alone"), 1, "compile", COMPILED)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_compiled_nccl_ranks_have_the_bits_of_a_compiled_one(
    tmp_path: Path, compiled_alone: dict[str, Any], ranks: int
) -> None:
    assert train(tmp_path, ranks, "compile", COMPILED) == compiled_alone


@pytest.mark.timeout(600)
def test_two_lanes_of_a_sharded_optimizer_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Each owner gets sums of floating-point numbers, in buckets of which a rank may own nothing."""
    cases = ["AdamW, sharded", "Muon, sharded"]
    assert train(tmp_path, 2, "eager", cases, lanes=2) == train(tmp_path, 1, "eager", cases, lanes=2)
