"""Well-known data sets by name: `read` gives one as tensors, `folder_of` says where its files are kept."""

from __future__ import annotations

from paceline.hub.catalog import folder_of
from paceline.hub.reader import read

__all__ = ["folder_of", "read"]
