"""`paceline doctor` as people use it: a rehearsal on real ranks, and a config that cannot work."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_recipe_is_rehearsed_on_two_ranks_and_leaves_nothing_behind(run, tmp_path: Path) -> None:
    ended = run("paceline", "doctor", "digits", "device=cpu", "--procs", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    found = {finding["name"]: finding for finding in json.loads(ended.stdout)}
    texts = {name: finding["text"] for name, finding in found.items()}
    assert texts["rehearsal"].startswith("one step on the CPU with 2 ranks")
    assert "accuracy" in texts["rehearsal"]
    assert "kB each" in texts["checkpoints"]
    assert texts["ranks"].startswith("2 ranks on cpu (gloo) on this machine")
    assert "GB/s among 2 ranks (gloo)" in texts["all-reduce"]
    assert {found[name]["state"] for name in ("config", "pickling", "rehearsal", "checkpoints")} == {"ok"}
    assert "rehearsal: one step on the CPU, processes: 2 …" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_does_not_exist_is_a_failure(run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model_fn: 'digits:get_model'\ndataset_fn: 'torch:zeros'\nloss_fn: cross_entropy\n"
    )
    ended = run("paceline", "doctor", "config.yaml")
    assert ended.returncode == 1
    last = ended.stdout.splitlines()[-2:]
    sentence = f"model_fn='digits:get_model' names a module that does not exist: digits.py in {tmp_path}"
    assert last == [f"{'FAILURE':8} {'config':14} {sentence}", f"{'':23} → fix it, then run paceline doctor again"]
