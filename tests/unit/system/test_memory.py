"""The memory of a rank."""

from __future__ import annotations

import psutil
import pytest
import torch

from paceline.system.memory import INTERVAL_S, Memory, used_on
from support.clocks import FakeClock

CPU = torch.device("cpu")


def test_on_a_cpu_it_is_the_resident_memory() -> None:
    before = used_on(CPU)
    held = torch.ones(2**25)  # 128 MB
    assert used_on(CPU) - before > 0.9 * held.nbytes
    assert used_on(CPU) == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_it_is_measured_at_most_once_a_second(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([10, 20])
    monkeypatch.setattr("paceline.system.memory.used_on", lambda device: next(values))
    memory = Memory(CPU)
    assert [memory.used, memory.used] == [10, 10]
    clock.advance(INTERVAL_S)
    assert [memory.used, memory.used] == [20, 20]
