"""Assigns the positions of an epoch to steps, lanes and ranks (pure).

Samples are never repeated or dropped: if they do not fill the last step, they are spread evenly over its lanes.
"""

from __future__ import annotations

from paceline.config.lane_counts import lane_counts
from paceline.errors import ConfigError, DataError


def even_part(size: int, parts: int, index: int) -> range:
    """Part `index` of `size` positions, cut into `parts` ranges whose lengths differ by at most one."""
    return range(size * index // parts, size * (index + 1) // parts)


# --- the managed loop: a step is `lanes` micro-batches, for any number of ranks ----------------------------------


def steps_per_epoch(size: int, batch_size: int, lanes: int) -> int:
    """The number of optimizer steps in one pass over `size` samples."""
    return -(-size // (batch_size * lanes))


def step_positions(step_in_epoch: int, size: int, batch_size: int, lanes: int) -> range:
    """The positions of a step's samples; fewer than `lanes × batch_size` only at the end of the epoch."""
    whole, last = batch_size * lanes, steps_per_epoch(size, batch_size, lanes) - 1
    # A last step with one sample gets another from the previous step: BatchNorm needs two.
    borrowed = 1 if size % whole == 1 and last > 0 and batch_size > 2 else 0
    first = step_in_epoch * whole - (borrowed if step_in_epoch == last else 0)
    return range(first, min((step_in_epoch + 1) * whole, size) - (borrowed if step_in_epoch == last - 1 else 0))


def lane_positions(step_in_epoch: int, lane: int, size: int, batch_size: int, lanes: int) -> range:
    """The positions of one micro-batch; empty if a short last step has too few samples for all lanes."""
    step = step_positions(step_in_epoch, size, batch_size, lanes)
    if len(step) == batch_size * lanes:
        return step[lane * batch_size : (lane + 1) * batch_size]
    # A short step is spread evenly, only over lanes that get at least two samples: BatchNorm needs two.
    used = max(-(-len(step) // batch_size), min(lanes, len(step) // 2))
    if lane >= used:
        return range(step.stop, step.stop)
    # Counted from the end, so that lane 0, whose statistics BatchNorm keeps, is among the longest.
    mirrored = even_part(len(step), used, used - 1 - lane)
    return range(step.stop - mirrored.stop, step.stop - mirrored.start)


def lanes_of(rank: int, world_size: int, lanes: int) -> range:
    """The lanes that a rank processes, one after the other."""
    if lanes < world_size:
        raise ConfigError(
            f"lanes={lanes} cannot be split over {world_size} ranks, which need a lane each; use at most "
            f"--procs {lanes}, or more lanes"
        )
    counts = lane_counts(lanes, world_size)
    first = sum(counts[:rank])
    return range(first, first + counts[rank])


# --- the user's own loop: every rank has the same number of batches ------------------------------------------------


def batches_per_rank(size: int, batch_size: int, world_size: int, *, what: str = "the data set") -> int:
    """The number of batches of every rank for `size` samples, none of them empty."""
    if size < world_size:
        raise DataError(f"{what} has {size} samples, fewer than the {world_size} ranks; add samples or use fewer ranks")
    # With batch_size=1 and a size that the ranks do not divide, some batches have two samples: better than a repeated
    # or a dropped one.
    return min(-(-size // (batch_size * world_size)), size // world_size)


def batch_positions(batch: int, rank: int, size: int, batches: int, world_size: int) -> range:
    """The positions of one rank's batch, with `size` samples spread over `world_size × batches` batches."""
    return even_part(size, batches * world_size, batch * world_size + rank)
