"""Numbers in words."""

from __future__ import annotations


def ranks_text(count: int) -> str:
    """Such as "1 rank" or "4 ranks"."""
    return "1 rank" if count == 1 else f"{count} ranks"
