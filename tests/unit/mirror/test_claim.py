"""The place of a run in a mirror: new for each run, the same for its attempts, written by one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.mirror.claim import InsideRunFolder, TakenOver, claim
from support.mirrors import copier_of, copy_all, make_run


def test_a_run_keeps_its_place_over_its_attempts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    first, second = (claim(folder, str(tmp_path / "disk"), "lab").place.url for _ in range(2))
    assert first == second == str(tmp_path / "disk" / "lab" / "run")
    assert json.loads(folder.mirror.read_text())["place"] == first


def test_a_new_run_does_not_overwrite_the_mirror_of_another(tmp_path: Path) -> None:
    copy_all(copier_of(make_run(tmp_path / "a" / "run", 3), tmp_path / "disk"))
    other = claim(make_run(tmp_path / "b" / "run"), str(tmp_path / "disk"), "lab")
    assert other.place.url == str(tmp_path / "disk" / "lab" / "run-2")


def test_files_that_are_no_mirror_are_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "disk" / "lab" / "run")
    assert claim(make_run(tmp_path / "run"), str(tmp_path / "disk"), "lab").place.url.endswith("/run-2")


def test_the_process_that_wrote_before_stops_when_the_run_is_resumed_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    before = copier_of(folder, tmp_path / "disk")
    claim(folder, str(tmp_path / "disk"), "lab")
    with pytest.raises(TakenOver, match="is now written by a process on"):
        copy_all(before)
    assert not list((tmp_path / "disk").rglob("manifest.json"))


def test_another_mirror_is_another_place(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    claim(folder, str(tmp_path / "disk"), "lab")
    assert claim(folder, str(tmp_path / "other"), "lab").place.url == str(tmp_path / "other" / "lab" / "run")


def test_a_run_cannot_be_mirrored_into_itself(tmp_path: Path) -> None:
    with pytest.raises(InsideRunFolder):
        claim(make_run(tmp_path / "lab" / "run"), str(tmp_path), "lab")
