"""`Run`, and the page that describes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.callbacks.run import Run
from paceline.errors import ConfigError

OF_ONE_RANK = {"save_requested", "asked_to_stop", "asked_to_finish"}  # which the loop shares with the others
PAGE = Path(__file__).parents[3] / "docs" / "your_loop.md"


def test_everything_that_a_run_has_is_in_the_documentation() -> None:
    fields, others = {field.name for field in dataclasses.fields(Run)}, {name for name in vars(Run) if name[0] != "_"}
    text = PAGE.read_text(encoding="utf-8").partition("## What `run` has")[2].partition("\n## ")[0]
    assert sorted(name for name in (fields | others) - OF_ONE_RANK if not re.search(rf"`{name}\b", text)) == []


@pytest.mark.parametrize("method", ["stop", "finish"])
@pytest.mark.parametrize("reason", [5, None, ""])
def test_the_end_of_a_run_needs_a_reason(method: str, reason: Any) -> None:
    run = Run(rank=0, world_size=1, device=torch.device("cpu"), folder=Path(), model=nn.Identity(), total_steps=None)
    with pytest.raises(ConfigError, match=rf"run\.{method}\({reason!r}\) needs a reason; pass a string that"):
        getattr(run, method)(reason)
    getattr(run, method)("it is good enough")
