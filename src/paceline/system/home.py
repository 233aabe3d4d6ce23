"""The folder that several users or nodes share: data sets, models, prepared data."""

from __future__ import annotations

import os
from pathlib import Path


def in_home(*parts: str) -> Path:
    """A path in $PACELINE_HOME, or in `shared_data` of the working folder if the variable is not set."""
    return Path(
        os.environ.get("PACELINE_HOME") or "shared_data", *parts
    ).expanduser()  # the value may come from a .env file, which no shell expands
