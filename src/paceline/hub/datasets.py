"""Well-known data sets by name: `read` returns one as tensors, `folder_of` the folder of its files."""

from __future__ import annotations

from paceline.hub.catalog import folder_of
from paceline.hub.reader import read

__all__ = ["folder_of", "read"]
