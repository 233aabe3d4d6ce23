"""The settings of the allocator, by what they change: the pages that the kernel gives to a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from paceline.system.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def step():
    kept = [torch.ones(4_000_000) for _ in range(12)]  # each below 32 MB, together above what glibc keeps by itself
    return sum(float(each[0]) for each in kept)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(what: str, **variables: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", STEPS, what], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    return int(ended.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_memory_that_a_step_frees_is_used_by_the_next_one() -> None:
    fresh, kept = faults("default"), faults("keep")
    assert kept < fresh / 100
    of_the_user = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert faults("keep", **of_the_user) == pytest.approx(faults("default", **of_the_user), rel=0.1)
