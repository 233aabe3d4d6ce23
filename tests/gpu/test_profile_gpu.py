"""`paceline profile` on a GPU: what the device is busy with, kernel by kernel and in CUDA graphs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config import build
from paceline.tools.profile.profile import profile
from support.datasets import signed


def images() -> TensorDataset:
    return signed(203, 3, 8, 8)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 2)
    )


@pytest.mark.parametrize("step_mode", ["eager", "graph"])
def test_the_kernels_of_a_step_are_seen_and_the_rest_of_it_is_idle(step_mode: str) -> None:
    config = build(
        {"model_fn": network, "dataset_fn": images, "loss_fn": "cross_entropy", "batch_size": 8, "step_mode": step_mode,
         "procs": 1, "device": "cuda"}
    )  # fmt: skip
    found = profile(config, 5, Path())
    assert found.device == "cuda"
    assert found.setting.is_replayed == (step_mode == "graph")
    assert list(found.phase_ms) == ["compute", "reduction", "copies", "idle"]
    [compute], [reduction] = found.phase_ms["compute"], found.phase_ms["reduction"]
    assert 0 < compute <= found.step_ms[0]
    assert reduction == 0
    assert sum(ms for [ms] in found.phase_ms.values()) == pytest.approx(found.step_ms[0])
    assert any("adam" in row.name.lower() for row in found.operators)
    events = json.loads(gzip.decompress(Path(found.traces[0]).read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) >= 5 * 5
    assert any(event.get("cat") == "phase" for event in events)
