"""Fixtures of the tests with several ranks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs with one rank and with several use one fork server, which would otherwise import torch for each change.

    Without this variable they need different ones: several ranks have passive threads, a single rank has not.
    """
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
