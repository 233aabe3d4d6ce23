"""Sums of which each rank needs a part: with a sharded optimizer, those of the gradients of its own parameters.

A reduce-scatter sends half of what an all-reduce sends. The parts of the ranks have different sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.engine.flat import slots_in, starts_of
from paceline.engine.integer_sum import Gradients, IntegerSum, Scratch
from paceline.world import World


class OwnerOrder:
    """The indices of some gradients, sorted by the rank that needs their sum."""

    def __init__(self, indices: Iterable[int], owners: Sequence[int], world: World) -> None:
        self.indices = sorted(indices, key=lambda index: owners[index])
        counts = [sum(owners[index] == rank for index in self.indices) for rank in range(world.size)]
        self._bounds = [0, *itertools.accumulate(counts)]
        self.first = self._bounds[world.rank]  # of this rank's gradients
        self.mine = self.indices[self.first : self._bounds[world.rank + 1]]

    def sizes(self, starts: Sequence[int]) -> list[int]:
        """The elements of each rank, if the gradients start there in a flat tensor."""
        bounds = [starts[bound] for bound in self._bounds]
        return [end - start for start, end in itertools.pairwise(bounds)]


class ReduceScatter:
    """Sums gradients over the ranks, each for its owner alone. The other ranks' gradients have any contents after."""

    def __init__(self, world: World, group: dist.ProcessGroup | None, scratch: Scratch) -> None:
        self._world, self._group, self._scratch = world, group, scratch

    def integers(self, total: IntegerSum, integers: torch.Tensor, sums: Gradients, order: OwnerOrder) -> None:
        """Write the sums of the integers of `total`, which has the gradients in this order. All ranks."""
        mine = self._sum(integers, order.sizes(total.starts))
        if order.mine:
            total.write([sums[index] for index in order.mine], mine, order.first)

    def floats(self, sums: Gradients, order: OwnerOrder, dtype: torch.dtype) -> None:
        """Replace gradients by their sums, computed in this format. All ranks."""
        like = [sums[index] for index in order.indices]
        starts = starts_of(like, 1)
        flat = self._scratch.take("floats", starts[-1], dtype, like[0].device)
        torch._foreach_copy_(slots_in(flat, like, starts), like)
        mine, own = self._sum(flat, order.sizes(starts)), [sums[index] for index in order.mine]
        if own:
            torch._foreach_copy_(own, slots_in(mine, own, starts_of(own, 1)))

    def _sum(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The sum over the ranks of this rank's part of a flat tensor. All ranks."""
        size, count = sizes[self._world.rank], self._world.size
        if self._world.backend != "gloo":
            mine = self._scratch.take("mine", size, tensor.dtype, tensor.device)
            # NCCL groups one reduction for each rank if the sizes differ.
            dist.reduce_scatter(mine, list(torch.split(tensor, sizes)), group=self._group)
            return mine
        # Gloo's reduce_scatter is an all-reduce, and its reduce sends up to twice as much.
        received = self._scratch.take("received", size * count, tensor.dtype, tensor.device)
        dist.all_to_all_single(received, tensor, [size] * count, sizes, group=self._group)
        first, *others = received.view(count, size).unbind()
        for other in others:  # always in the order of the ranks
            first.add_(other)
        return first
