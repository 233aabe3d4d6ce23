"""Fingerprints of weights: SHA-256 for results, and a cheap digest to compare replicas during training."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ConfigError, ReplicasDiffer
from paceline.world import World

INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def sha256_of(state: Mapping[str, Any]) -> str:
    """SHA-256 over a state dict in name order: name, dtype, shape and bytes of each tensor."""
    names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
    return sha256_of_each((name, state[name]) for name in names)


def sha256_of_each(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over pairs of name and tensor, which must be in name order."""
    digest = hashlib.sha256()
    for name, value in named:
        dense = value.detach().cpu() if value.layout is torch.strided else value.detach().cpu().to_dense()
        tensor = dense.resolve_conj().resolve_neg().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the state that an optimizer keeps for each parameter."""
    state = optimizer.state_dict()["state"]
    return sha256_of({f"{index}.{key}": value for index, kept in state.items() for key, value in kept.items()})


def sha256_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """SHA-256 over the states of several optimizers in order; None without optimizers."""
    hashes = [sha256_of_optimizer(optimizer) for optimizer in optimizers]
    if len(hashes) > 1:
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return hashes[0] if hashes else None


def digests_of(model: torch.nn.Module) -> torch.Tensor:
    """The `digest_of` each parameter; a single changed value always changes it."""
    return torch.stack([digest_of(parameter) for parameter in model.parameters()])


def check_replicas(model: torch.nn.Module, world: World, step: int) -> None:
    """Stop the run if the weights are not the same on every rank. All ranks."""
    of_ranks = torch.stack(world.gather_equal(digests_of(model)))
    differs = (of_ranks != of_ranks[0]).cpu()
    if differs.any():
        index = int(differs.any(dim=0).nonzero()[0])
        name = [name for name, _ in model.named_parameters()][index]
        raise ReplicasDiffer(name, differs[:, index].nonzero().flatten().tolist(), step)


def check_frozen(frozen: Sequence[tuple[str, torch.nn.Parameter]], world: World) -> None:
    """Stop the run if a parameter that was frozen at its start is now trainable on any rank. All ranks."""
    if not frozen:
        return
    flags = torch.tensor([parameter.requires_grad for _, parameter in frozen], dtype=torch.uint8, device=world.device)
    is_trainable = torch.stack(world.gather_equal(flags)).any(dim=0).tolist()
    if any(is_trainable):
        name, _ = frozen[is_trainable.index(True)]
        raise ConfigError(
            f"{name} was frozen when the run started and now requires a gradient, which is not summed over lanes and "
            "ranks; set requires_grad in model_fn, or use your own train_fn"
        )


def find_difference(model: torch.nn.Module, trained: Collection[str], world: World) -> tuple[str, list[int]] | None:
    """The first parameter whose values differ from rank 0's, and the ranks where they do. All ranks.

    Parameters in `trained` and those that are trainable now are compared; a parameter that is missing on a rank is a
    difference.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad or name in trained}
    digests = torch.stack([digest_of(parameter) for parameter in named.values()]).tolist() if named else []
    of_ranks = world.gather_objects(dict(zip(named, digests, strict=True)))
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        ranks = [rank for rank, of_rank in enumerate(of_ranks) if of_rank.get(name) != of_ranks[0].get(name)]
        if ranks:
            return name, ranks
    return None


def digest_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sum of the elements, read as integers of their size, on the device."""
    if parameter.element_size() not in INTEGER_TYPES:  # complex128
        parameter = torch.view_as_real(parameter.detach())
    return parameter.detach().contiguous().view(-1).view(INTEGER_TYPES[parameter.element_size()]).sum(dtype=torch.int64)
