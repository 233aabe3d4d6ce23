from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.run.layout import RunFolder, newest_run_below


def test_every_rank_has_its_own_log_and_failure_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.log(3) == tmp_path / "logs" / "rank-3.log"
    names = {folder.log(0), folder.log(1), folder.failure(0), folder.failure(1), folder.log("${local_rank}")}
    assert len(names) == 5


@pytest.mark.parametrize(("content", "is_result"), [(None, False), ("", False), ('{"step', False), ("{}", True)])
def test_a_run_is_finished_if_its_result_can_be_read(tmp_path: Path, content: str | None, is_result: bool) -> None:
    folder = RunFolder(tmp_path)
    if content is not None:
        folder.result.write_text(content)
    assert folder.has_result() == is_result


def test_the_newest_run_is_the_one_that_has_trained_last_although_another_is_used_later(tmp_path: Path) -> None:
    old, new = (RunFolder(tmp_path / "lab" / name) for name in ("2026-01-02_10-00-00", "2026-01-03_10-00-00"))
    for time_s, folder in enumerate((old, new), start=1_000):
        folder.path.mkdir(parents=True)
        folder.events.write_text("")
        os.utime(folder.events, (time_s, time_s))
    for folder in (new, old):
        (folder.path / "config.yaml").write_text("")
        (folder.path / "predict").mkdir()
    assert newest_run_below(tmp_path) == new.path
