"""How many threads one share of this machine gets."""

from __future__ import annotations

import pytest

from paceline.system import cores
from paceline.system.cores import chosen_threads


@pytest.mark.parametrize(
    ("chosen", "threads"), [("", 4), ("3", 3), ("3,2", 3), ("many", 4), ("0", 4), ("1", 4)]  # 1 is torchrun's
)  # fmt: skip
def test_threads_are_those_of_omp_num_threads_or_a_share_of_the_cores(
    chosen: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert chosen_threads(2, injected="1") == threads
