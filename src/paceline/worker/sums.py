"""Sums and rows over all ranks, of the user's numbers and tensors of any type."""

from __future__ import annotations

from functools import reduce
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.world import World


class TensorForm(NamedTuple):
    """The properties that must be equal on all ranks to sum tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def sum_over_ranks(value: Any, world: World) -> Any:
    """The sum of a number or tensor over all ranks, in rank order; in 64 bits, then in their common type. All ranks."""
    of_ranks = world.gather_objects(
        TensorForm(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
    )
    forms = [each for each in of_ranks if isinstance(each, TensorForm)]
    for each in of_ranks:
        if not isinstance(each, (Number, np.ndarray, np.generic, TensorForm)):
            raise ConfigError(f"run.sum got a {type(each).__name__}; pass a number or a tensor")
    if not forms:
        return sum(of_ranks)
    if len(shapes := {form.shape for form in forms}) > 1:
        raise ConfigError(
            f"run.sum got tensors of different shapes on the ranks: {sorted(shapes)}; use the same shape on all ranks"
        )
    # A rank without samples may have the number 0 where others have tensors.
    types = [each.dtype if isinstance(each, TensorForm) else torch.as_tensor(each).dtype for each in of_ranks]
    common = reduce(torch.promote_types, types)
    own = value.detach() if isinstance(value, torch.Tensor) else torch.full(forms[0].shape, value)
    total = torch.stack(world.gather_equal(own.to(world.device, _wide(common)))).sum(dim=0)
    return total.to(common) if common.is_floating_point or common.is_complex else total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of 64 bits in which numbers of a type are summed."""
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64


def mean_over_ranks(value: Any, weight: Any, world: World) -> Any:
    """The mean over all ranks, weighted by `weight`; NaN if all weights are 0. All ranks."""
    weight = weight.item() if isinstance(weight, torch.Tensor) else weight
    total_weight = sum_over_ranks(weight, world)
    total = sum_over_ranks(value * weight if weight else _zero_like(value), world)
    return total / total_weight if total_weight else total * float("nan")


def _zero_like(value: Any) -> Any:
    """Zero in the form of a value, which may be NaN on a rank without samples."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0


def rows_of_ranks(tensor: Any, world: World, *, with_grad: bool) -> torch.Tensor:
    """The rows of all ranks, in rank order. All ranks."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"run.gather got a {type(tensor).__name__}; pass a tensor with a row for each sample")
    rows = (tensor[None] if tensor.ndim == 0 else tensor).to(world.device)
    if with_grad and not rows.is_floating_point():
        raise ConfigError(f"run.gather(…, with_grad=True) got a tensor of type {rows.dtype}, which has no gradient")
    if with_grad:
        return GatherWithGradient.apply(rows, world)  # type: ignore[no-any-return, no-untyped-call]
    return torch.cat(world.gather_rows(rows.detach()))


class GatherWithGradient(torch.autograd.Function):
    """The rows of all ranks; the gradient of a row is the sum of the gradients that all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, world: World) -> torch.Tensor:
        """All ranks."""
        parts = world.gather_rows(rows)
        ctx.world, ctx.start, ctx.rows = world, sum(map(len, parts[: world.rank])), len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """All ranks."""
        total = gradients[0].contiguous().clone()
        if ctx.world.size > 1:
            dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.rows], None
