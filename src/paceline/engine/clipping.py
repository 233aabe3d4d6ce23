"""Clips gradients by their common norm, also where each rank has the gradients of its own parameters only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from paceline.engine.sharding import Sharding


@torch.no_grad()
def clip_by_norm(
    parameters: Sequence[torch.nn.Parameter], limit: float, sharding: Sharding | None
) -> torch.Tensor | float:
    """Scale gradients so that their common norm is at most `limit`; return the norm that they had.

    `parameters` are those that have a gradient, on this rank or on their owner, in the same order on all ranks. The
    bits are those of `torch.nn.utils.clip_grad_norm_`. All ranks.
    """
    if not parameters:
        return 0.0
    norms = norms_of([parameter.grad for parameter in parameters], parameters)
    norm: torch.Tensor = torch.linalg.vector_norm(norms if sharding is None else sharding.with_others(norms))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def norms_of(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, 0 for None, in the format to which those of `like` are promoted."""
    norms = [torch.zeros((), device=like[0].device)] * len(gradients)
    present = [(place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
    for dtype in {gradient.dtype for _, gradient in present}:
        places, same = zip(*[(place, each) for place, each in present if each.dtype == dtype], strict=True)
        for place, norm in zip(places, torch._foreach_norm(list(same)), strict=True):
            norms[place] = norm
    common = functools.reduce(torch.promote_types, [each.dtype for each in like])
    return torch.stack([norm.to(common) for norm in norms])
