"""Fixtures of the tests with several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_fork_server() -> Iterator[None]:
    """Let runs with one rank and with several use one fork server, which would otherwise import torch for each change.

    Without this variable they need different ones: several ranks have passive threads, a single rank has not.
    """
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("OMP_WAIT_POLICY", "passive")
        yield
