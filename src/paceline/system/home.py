"""The folder that several users or nodes share: data sets, models, prepared data."""

from __future__ import annotations

import os
from pathlib import Path


def in_home(*parts: str) -> Path:
    """A path in $PACELINE_HOME, or without that variable in `shared_data` of the working folder."""
    return Path(os.environ.get("PACELINE_HOME") or "shared_data", *parts).expanduser()  # no shell expands a .env file
