"""Well-known data sets by name: `read` returns samples, `table` a DataFrame, `folder_of` the folder of the files."""

from __future__ import annotations

from paceline.hub.catalog import folder_of
from paceline.hub.reader import Texts, read
from paceline.hub.tables import table

__all__ = ["Texts", "folder_of", "read", "table"]
