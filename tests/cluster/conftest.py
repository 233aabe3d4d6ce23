"""Hosts and Slurm for the tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import PACELINE, SLURM_TOOLS, Lab, Slurm, obstacle, outcome, processes_with, until

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def whole_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := obstacle():
        pytest.skip(reason)
    lab = Lab(tmp_path_factory.mktemp("lab"), hosts=3)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


@pytest.fixture
def lab(whole_lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    """Hosts for one test, which starts in a folder with the work; no process may be left when it ends."""
    for name in ("work.py", "config.yaml"):
        shutil.copy(HERE / name, tmp_path)
    try:
        yield whole_lab
        until(lambda: not processes_with(str(tmp_path)), timeout_s=10)
    finally:
        whole_lab.end_all()


@pytest.fixture(scope="session")
def whole_slurm(whole_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [tool for tool in SLURM_TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (slurm-wlm, munge)")
    slurm = Slurm(whole_lab, tmp_path_factory.mktemp("slurm"))
    try:
        slurm.up()
        yield slurm
    finally:
        slurm.down()


@pytest.fixture
def slurm(lab: Lab, whole_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Slurm for one test, with its configuration in the environment."""
    monkeypatch.setenv("SLURM_CONF", str(whole_slurm.conf))
    return whole_slurm


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The results of the work in a single process."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("work.py", "config.yaml"):
        shutil.copy(HERE / name, folder)
    subprocess.run([PACELINE, "train", "config.yaml", "--procs", "1"], cwd=folder, check=True, capture_output=True)
    return outcome(folder)
