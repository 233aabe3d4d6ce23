"""The short form of `make chaos`: every kind of hit once, but for those that take long."""

from __future__ import annotations

from pathlib import Path

from chaos import run_chaos


def test_a_run_that_is_hit_in_every_way_ends_with_the_hash_of_the_undisturbed_one(tmp_path: Path) -> None:
    run_chaos(tmp_path, hits=7, seed=11)
