"""`paceline bench`: the loops side by side, in one table."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_small_run_shows_both_loops_and_writes_every_figure(run, tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("raise RuntimeError('a file of the user, in place of a module')")
    ended = run(
        "paceline", "bench", "--models", "mnist", "--steps", "60", "--rounds", "1", "--only", "hand-written,paceline",
        "--device", "cpu", "--out", "bench.json", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    rows = report["models"][0]["rows"]
    assert [(row["title"], row["has_ddp"], row["error"]) for row in rows] == [
        ("hand-written DDP", True, ""), ("Paceline", False, "")
    ]  # fmt: skip
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert f"{row['us_per_step']:,.0f}" in ended.stdout
        assert f"{row['ratio']:.2f}" in ended.stdout
    assert report["machine"]["gpu"] is None
    assert len(ended.stderr.splitlines()) == 2  # one line a measurement, and no warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "statistics.py"]


def test_a_name_that_is_not_known_is_a_mistake_on_the_command_line(run) -> None:
    ended = run("paceline", "bench", "--only", "lightening", "--scaling", "1,2")
    assert ended.returncode == 2
    assert "--only lightening is not known; use hand-written, recorded, paceline" in ended.stderr
