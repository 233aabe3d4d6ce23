"""`paceline plan` against reality: the time of a step on hosts whose links are slow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab import obstacle

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan.py"


@pytest.mark.long
def test_the_step_time_on_slow_links_is_predicted(tmp_path: Path) -> None:
    if reason := obstacle() or ("there is no C compiler" if shutil.which("cc") is None else None):
        pytest.skip(reason)
    rows = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, BENCHMARK, "--cases", "0", "--out", rows], check=True, timeout=600)
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if row["rate"] == "10mbit":  # of which this machine is never the limit
            assert row["predicted"] == pytest.approx(row["measured"], rel=0.25)
