"""What several unit tests share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.config import Config, Settings, build
from support.clocks import FakeClock
from support.configs import MANAGED, settings_of

# The tensors here are small. With several test processes, more threads only wait for each other's cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Configs and jobs add to sys.path and import the user's modules; the next test finds none of that."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replaces the clocks of the process by one that stands still until the test advances it."""
    clock = FakeClock()
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, clock.read)
    return clock


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read what is in files, not what a disk keeps after a crash."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def hide_package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Builds a config of the managed loop that is right as it is, with any keys changed."""

    return lambda **keys: build({**MANAGED, **keys})


@pytest.fixture
def make_settings(make_config: Callable[..., Config]) -> Callable[..., Settings]:
    """Builds the settings of such a config for a single rank on the CPU."""
    return lambda **keys: settings_of(make_config(**keys))
