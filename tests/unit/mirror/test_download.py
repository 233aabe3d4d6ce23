"""A mirrored run on an empty machine: what is downloaded, and what happens with damaged checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.store import MANIFEST, Store, verify
from paceline.config import Config, read_yaml
from paceline.errors import CheckpointsDamaged, ConfigError
from paceline.mirror import transfer
from paceline.mirror.claim import claim
from paceline.mirror.download import fetch_to_resume
from paceline.mirror.reading import fetch_weights, folder_of_run, local_copy
from paceline.results.trust import why_untrusted
from paceline.run.layout import RunFolder
from support.mirrors import copier_of, copy_all, make_run, publish

MakeConfig = Callable[..., Config]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mirror of a run with the checkpoints 3, 6 and 9; the best is 3."""
    monkeypatch.setattr(transfer, "RETRY_S", 0.0)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    folder = make_run(tmp_path / "old" / "run")
    for step, accuracy in ((3, 0.9), (6, 0.2), (9, 0.3)):
        publish(folder, step, accuracy=accuracy)
    copy_all(copier_of(folder, tmp_path / "disk"))
    return tmp_path / "disk" / "lab" / "run"


def steps_in(folder: Path) -> list[str]:
    return [path.name for path in Store(folder / "checkpoints").paths()]


def test_the_newest_checkpoint_and_the_best_are_downloaded(place: Path, make_config: MakeConfig) -> None:
    best = {"best": {"metric": "accuracy", "mode": "max"}}
    folder = fetch_to_resume(make_config(resume=str(place), metrics=["accuracy"], checkpoint=best))
    assert folder.parent == Path("runs/run").resolve()
    assert steps_in(folder) == ["step-00000009", "step-00000003"]
    for path in Store(folder / "checkpoints").paths():
        verify(path)
    assert read_yaml(folder / "config.yaml") == {"name": "lab", "lanes": 1}
    assert claim(RunFolder(folder), str(place.parents[1]), "lab").place.url == str(place)


def damage(place: Path, step: int, how: str) -> None:
    path = place / "checkpoints" / f"step-{step:08d}"
    if how == "truncated":
        (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-1])
    elif how == "changed":
        (path / "state.pt").write_bytes(b"x" * (path / "state.pt").stat().st_size)
    elif how == "missing file":
        (path / "state.pt").unlink()
    elif how == "damaged manifest":
        (path / MANIFEST).write_text("{")


@pytest.mark.parametrize("how", ["truncated", "changed", "missing file", "damaged manifest"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    place: Path, make_config: MakeConfig, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(place, 9, how)
    folder = fetch_to_resume(make_config(resume=str(place)))
    assert steps_in(folder) == ["step-00000006"]
    assert "warning: step-00000009 in " in capsys.readouterr().err


def test_a_checkpoint_without_a_manifest_is_none(
    place: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "checkpoints" / "step-00000009" / MANIFEST).unlink()
    assert steps_in(fetch_to_resume(make_config(resume=str(place)))) == ["step-00000006"]
    assert "warning" not in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_from_the_beginning(
    place: Path, make_config: MakeConfig
) -> None:
    for step in (3, 6, 9):
        damage(place, step, "truncated")
    with pytest.raises(CheckpointsDamaged, match="none of the checkpoints"):
        fetch_to_resume(make_config(resume=str(place)))
    assert not any(Path("runs/run").iterdir())


def test_a_mirror_that_lost_its_checkpoints_is_not_started_from_the_beginning(
    place: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "b" / "run")
    folder.events.write_text('{"event": "checkpoint", "time": 1.0, "step": 3}\n')
    copy_all(copier_of(folder, tmp_path / "disk"))
    with pytest.raises(ConfigError, match=f"run-2 has no checkpoint yet; give another .*: {place}; or start a new run"):
        fetch_to_resume(make_config(resume=f"{place}-2"))
    (place.parent / "run-2" / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match="run-2 has no checkpoint yet"):
        fetch_to_resume(make_config(resume=f"{place}-2"))


def test_a_run_that_was_lost_before_its_first_checkpoint_starts_from_the_beginning(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copier = copier_of(make_run(tmp_path / "a" / "run", 3), tmp_path / "disk")
    for _ in range(3):  # the config, the events, and a part of the first checkpoint
        copier.copy_next(is_last=False)
    folder = fetch_to_resume(make_config(resume=str(tmp_path / "disk" / "lab" / "run")))
    assert RunFolder(folder).config.exists()
    assert steps_in(folder) == []
    assert (
        "has no checkpoint, and its events show that the run had saved none yet; it starts" in capsys.readouterr().err
    )


def test_a_folder_that_has_a_run_is_not_touched(place: Path, make_config: MakeConfig) -> None:
    make_run(Path("taken"), 1)
    with pytest.raises(ConfigError, match="already contains a run; resume it with --resume auto"):
        fetch_to_resume(make_config(resume=str(place), run_dir="taken"))
    assert steps_in(Path("taken")) == ["step-00000001"]


def test_a_failed_download_removes_no_file_of_the_user(place: Path, make_config: MakeConfig) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("keep")
    for step in (3, 6, 9):
        damage(place, step, "truncated")
    with pytest.raises(CheckpointsDamaged):
        fetch_to_resume(make_config(resume=str(place), run_dir="mine"))
    assert Path("mine/notes").exists()


def test_the_error_for_a_folder_of_runs_names_them(place: Path, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=f"contains 1 mirrored runs; give one of them: {place}"):
        fetch_to_resume(make_config(resume=f"file://{place.parent}"))
    with pytest.raises(ConfigError, match="has no files"):
        fetch_to_resume(make_config(resume=f"file://{place}-none"))


def test_names_in_a_mirror_cannot_lead_out_of_the_run_folder(
    place: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = transfer.MirrorPlace.sizes
    monkeypatch.setattr(transfer.MirrorPlace, "sizes", lambda self: {**real(self), "images/../../../evil.png": 3})
    folder = fetch_to_resume(make_config(resume=str(place)))
    assert not list(folder.parent.parent.rglob("evil.png"))


def test_a_downloaded_run_is_trusted_only_when_it_was_trained_here(place: Path, make_config: MakeConfig) -> None:
    folder = RunFolder(fetch_to_resume(make_config(resume=str(place))))
    forged: dict[str, Any] = {"event": "run_started", "time": 2.0, "run_dir": str(folder.path)}
    folder.events.write_text(json.dumps(forged) + "\n")
    assert why_untrusted(folder, {}) == f"was downloaded from {place}"
    folder.fetched.unlink()  # as the first attempt here does
    assert why_untrusted(folder, {}) is None


def test_a_report_reads_no_weights_and_an_evaluation_those_it_needs(place: Path) -> None:
    folder = RunFolder(local_copy(str(place)))
    assert steps_in(folder.path) == ["step-00000009", "step-00000006", "step-00000003"]
    assert not list(folder.path.rglob("*.safetensors"))
    path = Store(folder.checkpoints).path(6)
    fetch_weights(folder, path)
    verify(path)
    assert len(list(folder.path.rglob("*.safetensors"))) == 1


def test_a_mirror_in_a_folder_is_read_through_a_copy(place: Path, tmp_path: Path) -> None:
    assert folder_of_run(str(place)) == folder_of_run(f"file://{place}")
    assert folder_of_run(place).is_relative_to(tmp_path / "home" / "mirrors")
    assert folder_of_run("runs/lab") == Path("runs/lab")


def test_a_copy_follows_the_mirror(place: Path, tmp_path: Path) -> None:
    folder = RunFolder(local_copy(str(place)))
    source = make_run(tmp_path / "old" / "run", 12)
    copy_all(copier_of(source, tmp_path / "disk"))
    (place / "checkpoints" / "step-00000003" / MANIFEST).unlink()
    assert RunFolder(local_copy(str(place))).path == folder.path
    assert steps_in(folder.path) == ["step-00000012", "step-00000009", "step-00000006"]


def test_a_url_with_a_password_is_rejected_without_showing_it() -> None:
    with pytest.raises(ConfigError) as caught:
        folder_of_run("s3://KEY:geheim/x@bucket/run")
    assert "geheim" not in str(caught.value)
    assert "KEY" not in str(caught.value).partition(" ")[0]
    assert "environment variables" in str(caught.value)
