"""ZeRO-1: a rank keeps the optimizer's state of its own parameters only, and sends their new values to the others.

The optimizer knows all parameters, so indices, groups and learning rates are the same as without sharding; only the
gradients of parameters that other ranks own are removed: their sums are computed on their owners alone (`scatter.py`).
Where an update depends on one parameter alone, the bits are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.data.trees import TreePath, map_leaves
from paceline.engine.optimizers import needs_closure
from paceline.errors import ConfigError
from paceline.run.tensor_files import DTYPES
from paceline.world import COLLECTIVE_TIMEOUT, World


class Transfer(NamedTuple):
    """A tensor that one rank has and another one needs."""

    name: str
    source: int
    target: int


class OwnerBucket(NamedTuple):
    """Parameters of one owner and one format, which are sent together."""

    owner: int
    parameters: list[torch.Tensor]

    @property
    def is_flat(self) -> bool:
        """Whether it can be sent without a copy."""
        return len(self.parameters) == 1 and self.parameters[0].is_contiguous()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor, in the shapes of the parameters."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


def balanced_owners(sizes: Sequence[int], world_size: int) -> list[int]:
    """A rank for each size: in order of decreasing size, the rank with the smallest sum so far (pure)."""
    loads, ranks = [0] * world_size, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def owners_of(optimizer: torch.optim.Optimizer, world_size: int) -> list[int]:
    """The rank that owns each parameter, in the order of the groups, the same on all ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # An optimizer may compute several parameters together, and the last bits may depend on which ones.
    units = optimizer.units() if hasattr(optimizer, "units") else [[parameter] for parameter in parameters]
    sizes = [sum(parameter.nbytes for parameter in unit if parameter.requires_grad) for unit in units]
    by_unit = zip(units, balanced_owners(sizes, world_size), strict=True)
    owner = {parameter: rank for unit, rank in by_unit for parameter in unit}
    return [owner.get(parameter, 0) for parameter in parameters]  # empty parameters may be in no unit


class Sharding:
    """Assigns the state of each parameter to one rank, and sends parameters and states between ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, bucket_bytes: float) -> None:
        """All ranks."""
        if needs_closure(type(optimizer)):
            raise ConfigError(
                f"shard_optimizer=true cannot be used with {type(optimizer).__name__}, which needs all gradients at "
                "once; remove shard_optimizer"
            )
        self.optimizer, self.world = optimizer, world
        self.owners = owners_of(optimizer, world.size)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._owner_of: dict[torch.Tensor, int] = dict(zip(parameters, self.owners, strict=True))
        for parameter in parameters:
            if self._owner_of[parameter] != world.rank:
                optimizer.state.pop(parameter, None)  # some optimizers create it before the first step
        self._rounds = rounds_of(parameters, self.owners, bucket_bytes)
        # On the host: a checkpoint or a hash needs no device memory for the state of other ranks.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world.size > 1 else None

    @property
    def mine(self) -> set[int]:
        """The indices of this rank's parameters in the optimizer's state dict."""
        return {index for index, owner in enumerate(self.owners) if owner == self.world.rank}

    @property
    def elsewhere(self) -> set[torch.Tensor]:
        """The parameters that other ranks own."""
        return {parameter for parameter, owner in self._owner_of.items() if owner != self.world.rank}

    def owner_of(self, parameter: torch.Tensor) -> int:
        """The rank that owns a parameter; rank 0 if the optimizer does not have it."""
        return self._owner_of.get(parameter, 0)

    # --- a step ------------------------------------------------------------------------------------------------

    def drop_others(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remove the gradients of parameters that other ranks own, which are not summed on this one."""
        for parameter in parameters:
            if self.owner_of(parameter) != self.world.rank:
                parameter.grad = None

    def largest(self, number: torch.Tensor) -> torch.Tensor:
        """The largest of a number over the ranks, which know different gradients. All ranks."""
        number = number.to(self.world.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number

    def with_others(self, norms: torch.Tensor) -> torch.Tensor:
        """The norms of the gradients of all ranks; those of other ranks are 0 in `norms`. All ranks."""
        dist.all_reduce(norms)  # adding 0 rounds nothing
        return norms

    def step(self) -> None:
        """Update this rank's parameters, and receive those of the other ranks. All ranks."""
        self.optimizer.step()
        self._share()

    @torch.no_grad()
    def _share(self) -> None:
        """Broadcast the parameters of every owner. All ranks."""
        for buckets in self._rounds:
            sent = [self._broadcast(bucket) for bucket in buckets]
            for bucket, (work, flat) in zip(buckets, sent, strict=True):
                work.wait()
                if bucket.owner != self.world.rank and not bucket.is_flat:
                    torch._foreach_copy_(bucket.parameters, bucket.views(flat))

    def _broadcast(self, bucket: OwnerBucket) -> tuple[dist.Work, torch.Tensor]:
        """Start to broadcast a bucket from its owner. All ranks."""
        first = bucket.parameters[0]
        flat = first.view(-1) if bucket.is_flat else first.new_empty(sum(p.numel() for p in bucket.parameters))
        if bucket.owner == self.world.rank and not bucket.is_flat:
            torch._foreach_copy_(bucket.views(flat), bucket.parameters)
        # As bytes, because backends do not support all dtypes.
        work = dist.broadcast(flat.view(torch.uint8), src=bucket.owner, async_op=True)
        assert work is not None
        return work, flat

    # --- the whole state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state dict of all parameters; tensors that only other ranks have are on the device "meta". All ranks."""
        mine = self.optimizer.state_dict()
        parts = self.world.gather_objects(map_leaves(mine["state"], _on_meta, is_plain=True))
        parts[self.world.rank] = mine["state"]
        by_index = enumerate(self.owners)
        return {**mine, "state": {index: parts[owner][index] for index, owner in by_index if index in parts[owner]}}

    def owners_in(self, names: Iterable[str]) -> dict[str, int]:
        """The owner of each tensor, by its path in the state dict; tensors that all ranks have are left out."""
        paths = {name: name.split(".") for name in names}
        return {name: self.owners[int(path[1])] for name, path in paths.items() if path[0] == "state"}

    def transfer(self, moves: Sequence[Transfer], tensors: Mapping[str, torch.Tensor]) -> None:
        """Send and receive tensors in host memory. All ranks, with the same moves; in any thread, one at a time."""
        work = []
        for tag, (name, source, target) in enumerate(moves):
            if source == self.world.rank:
                work.append(dist.isend(tensors[name], target, group=self._group, tag=tag))
            elif target == self.world.rank:
                work.append(dist.irecv(tensors[name], source, group=self._group, tag=tag))
        for each in work:
            if each is not None:
                each.wait()

    def gathered_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the whole state on rank 0, one by one in name order. All ranks must exhaust it."""
        state = self.state_dict()["state"]
        named = {f"{index}.{key}": (value, index) for index, kept in state.items() for key, value in kept.items()}
        for name in sorted(name for name, (value, _) in named.items() if isinstance(value, torch.Tensor)):
            value, index = named[name]
            owner = self.owners[index]
            if owner and self.world.rank in (owner, 0):
                value = torch.empty(value.shape, dtype=value.dtype) if value.is_meta else value.cpu().contiguous()
                self.transfer([Transfer(name, owner, 0)], {name: value})
            if self.world.is_main:
                yield name, value


def rounds_of(
    parameters: Sequence[torch.Tensor], owners: Sequence[int], bucket_bytes: float
) -> list[list[OwnerBucket]]:
    """Buckets in rounds with one bucket of each owner, so that memory is needed for one round at a time (pure)."""
    by_owner: dict[int, list[OwnerBucket]] = {}
    last: dict[tuple[int, torch.dtype], tuple[OwnerBucket, int]] = {}  # and its bytes
    for parameter, owner in zip(parameters, owners, strict=True):
        if not parameter.numel() or not parameter.requires_grad:
            continue
        bucket, filled = last.get((owner, parameter.dtype), (None, 0))
        if bucket is None or filled + parameter.nbytes > bucket_bytes:
            bucket, filled = OwnerBucket(owner, []), 0
            by_owner.setdefault(owner, []).append(bucket)
        bucket.parameters.append(parameter)
        last[owner, parameter.dtype] = bucket, filled + parameter.nbytes
    rounds = itertools.zip_longest(*by_owner.values())
    return [[bucket for bucket in buckets if bucket is not None] for buckets in rounds]


def _on_meta(_: TreePath, leaf: Any) -> Any:
    """The tensor on the device "meta" if its dtype can be stored in a file, else with its contents on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_in_file = leaf.dtype in DTYPES
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if is_in_file else leaf.cpu()
