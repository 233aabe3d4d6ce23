"""Batches as trees of tuples, lists and dicts: every tensor in one, or one with every tensor changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree of tuples, lists and dicts with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, PackedSequence):  # whose batch_sizes belong to the host
        moved = (change(each) if each is not None else None for each in (tree.sorted_indices, tree.unsorted_indices))
        return PackedSequence(change(tree.data), tree.batch_sizes, *moved)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor in a batch of tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [tensor for value in tree if value is not None for tensor in tensors_in(value)]
    return tensors_in(list(tree.values())) if isinstance(tree, Mapping) else []


def to_channels_last(batch: Any) -> Any:
    """A batch whose images (four dimensions of floats) lie by channels; the rest is as it was."""
    if isinstance(batch, torch.Tensor):
        is_images = batch.ndim == 4 and batch.is_floating_point()
        return batch.contiguous(memory_format=torch.channels_last) if is_images else batch
    if isinstance(batch, dict):
        return {key: to_channels_last(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_channels_last, batch))
    return type(batch)(map(to_channels_last, batch)) if isinstance(batch, (list, tuple)) else batch
