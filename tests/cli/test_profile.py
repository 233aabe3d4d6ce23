"""`paceline profile` as people use it: two ranks that wait for their data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

LAB = """import time
import torch

class Slow:
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((4,), float(index)), index % 2

def model(): return torch.nn.Linear(4, 2)
"""
CONFIG = (
    "name: lab\nmodel_fn: 'lab:model'\ndataset_fn: 'lab:Slow'\nloss_fn: cross_entropy\nbatch_size: 8\ndevice: cpu\n"
)


def test_two_ranks_are_timed_and_traced_and_the_advice_names_what_they_wait_for(run, tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(LAB)
    (tmp_path / "config.yaml").write_text(CONFIG)
    ended = run("paceline", "profile", "config.yaml", "--procs", "2", "--steps", "3", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    folder = Path(found["run_dir"])
    assert folder.parent == tmp_path / "runs" / "lab" / "profile"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "weights.safetensors").exists()
    assert json.loads((folder / "profile" / "profile.json").read_text()) == found

    whole = [sum(ms) for ms in zip(*found["phase_ms"].values(), strict=True)]
    assert whole == pytest.approx(found["step_ms"])
    assert "of a step is spent waiting for data with workers=0; try workers=" in found["advice"][0]
    assert 0 < len(found["operators"]) <= 10
    for rank, path in enumerate(found["traces"]):
        assert Path(path) == folder / "profile" / f"rank-{rank}.json.gz"
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        phases = [event["name"] for event in events if event.get("cat") == "phase"]
        assert phases.count("optimizer") == 3
        assert set(phases) == {"data", "forward", "backward", "reduction", "optimizer", "other"}
        assert sum(event["name"] == "AddmmBackward0" for event in events) == 3
