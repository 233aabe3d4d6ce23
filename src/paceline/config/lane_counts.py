"""How many lanes of a step each rank processes."""

from __future__ import annotations


def lane_counts(lanes: int, ranks: int) -> list[int]:
    """The number of lanes of each rank: where they do not divide evenly, the first ranks have one more (pure)."""
    each, more = divmod(lanes, ranks)
    return [each + (rank < more) for rank in range(ranks)]
