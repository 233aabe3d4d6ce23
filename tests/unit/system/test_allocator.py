"""The settings of the allocator, and what they do: a step needs no new pages from the kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.system.allocator import LARGEST_THRESHOLD, MMAP_THRESHOLD, TRIM_THRESHOLD, VARIABLES, keep_freed_memory

PAGES_OF_A_STEP = 12 * 16_000_000 // 4096
STEPS = """
import resource, torch
from paceline.system.allocator import keep_freed_memory

keep_freed_memory()

def step():
    kept = [torch.ones(4_000_000) for _ in range(12)]
    return sum(float(each[0]) for each in kept)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_memory_that_a_step_frees_is_used_by_the_next_one() -> None:
    ended = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < PAGES_OF_A_STEP / 50


@pytest.mark.parametrize("variable", [None, *VARIABLES])
def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    options: dict[int, int] = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=options.__setitem__))
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    keep_freed_memory()
    assert set(options) >= {MMAP_THRESHOLD, TRIM_THRESHOLD} if variable is None else not options
    assert options.get(MMAP_THRESHOLD, LARGEST_THRESHOLD) == LARGEST_THRESHOLD


def test_a_c_library_without_settings_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()
