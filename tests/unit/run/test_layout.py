from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.layout import RunFolder


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
