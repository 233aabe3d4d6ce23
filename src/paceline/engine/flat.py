"""Tensors one after the other in one piece of memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def starts_of(tensors: Sequence[torch.Tensor], unit: int) -> list[int]:
    """Where each tensor starts, in elements, if each takes a multiple of `unit` of them; and the end of the last."""
    return [0, *itertools.accumulate(-(-tensor.numel() // unit) * unit for tensor in tensors)]


def slots_in(buffer: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> list[torch.Tensor]:
    """The parts of a flat buffer for some tensors: with their shapes, and their strides where these leave no gaps."""
    return [_slot(buffer[start : start + each.numel()], each) for each, start in zip(tensors, starts, strict=False)]


def _slot(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return part.as_strided(like.shape, like.stride()) if is_dense(like) else part.view(like.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory without gaps, in the order of any of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
