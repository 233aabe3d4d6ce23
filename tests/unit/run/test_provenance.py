"""The machine, versions and commit that a run records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from paceline import __version__
from paceline.run import provenance
from paceline.run.provenance import commit_of, origin_of


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "model.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "one")
    return tmp_path / "lab"


def test_the_commit_is_that_of_the_code_and_shows_local_changes(project: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")[:12]
    assert commit_of(project) == commit
    (project / "model.py").write_text("x = 2\n")
    assert commit_of(project) == f"{commit}-dirty"


def test_a_folder_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) is None
    assert commit_of(tmp_path / "gone") is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None  # no git at all


def test_a_slow_git_is_not_waited_for(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 0.0)
    assert commit_of(project) is None


def test_the_origin_names_machine_and_versions(project: Path) -> None:
    facts = origin_of(project, torch.device("cpu"))
    assert facts["versions"]["paceline"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["gpu"] is None
    assert facts["machine"]["cores"] >= 1
    assert origin_of(None, torch.device("cpu"))["commit"] is None
