"""The shared folder, and the compiler's cache in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.system.home import in_home, use_compiler_cache

NAME = "TORCHINDUCTOR_CACHE_DIR"


def test_a_tilde_in_paceline_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_HOME", "~/shared")
    assert in_home("models", "bert") == tmp_path / "shared/models/bert"
    monkeypatch.setenv("PACELINE_HOME", "")
    assert in_home("models") == Path("shared_data/models")


@pytest.mark.parametrize("before", [None, "/tmp/torchinductor_me"], ids=["not set", "set by torch"])
def test_compiled_code_is_kept_in_the_shared_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(NAME, before or "")
    if before is None:
        monkeypatch.delenv(NAME)
    use_compiler_cache("torch-cpu", default="/tmp/torchinductor_me")
    assert os.environ[NAME] == str(tmp_path / "home" / "compiled" / "torch-cpu")
    assert Path(os.environ[NAME]).is_dir()


def test_a_folder_that_the_user_has_chosen_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(NAME, "/mine")
    use_compiler_cache("torch-cpu", default="/tmp/torchinductor_me")
    assert os.environ[NAME] == "/mine"
    assert not (tmp_path / "home").exists()


def test_torch_uses_its_own_folder_where_the_shared_one_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(NAME, "/tmp/torchinductor_me")
    use_compiler_cache("torch-cpu", default="/tmp/torchinductor_me")
    assert os.environ[NAME] == "/tmp/torchinductor_me"


def test_torch_uses_its_own_folder_where_the_name_of_the_shared_one_has_a_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "my home"))
    monkeypatch.setenv(NAME, "/tmp/torchinductor_me")
    use_compiler_cache("torch-cpu", default="/tmp/torchinductor_me")
    assert os.environ[NAME] == "/tmp/torchinductor_me"
