"""Which library sums over the ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigError
from paceline.world import NCCL_ON_SHARED_GPU, pick_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NCCL_ON_SHARED_GPU, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("wanted", "device", "ranks", "backend"),
    [("auto", CPU, 1, "gloo"), ("auto", GPU, 2, "nccl"), ("auto", GPU, 3, "gloo"), ("gloo", GPU, 2, "gloo")],
)
def test_nccl_is_used_where_each_rank_has_a_gpu(wanted: str, device: torch.device, ranks: int, backend: str) -> None:
    assert pick_backend(wanted, device, ranks) == backend


@pytest.mark.parametrize(
    ("device", "ranks", "reason"),
    [(CPU, 1, "the ranks run on the CPU"), (GPU, 3, "3 ranks share fewer GPUs")],
)
def test_nccl_is_refused_where_it_cannot_work(device: torch.device, ranks: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        pick_backend("nccl", device, ranks)


def test_tests_can_use_nccl_with_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_ON_SHARED_GPU, "1")
    assert pick_backend("auto", GPU, 3) == "nccl"
    assert pick_backend("auto", CPU, 3) == "gloo"
