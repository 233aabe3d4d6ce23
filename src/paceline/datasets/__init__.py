"""Well-known data sets by name: `read` gives one as tensors, `paceline data get NAME` brings its files."""

from __future__ import annotations

from paceline.datasets.reader import read

__all__ = ["read"]
