"""Trees of tensors: walks batches and states, which are nested tuples, lists and mappings.

A mapping of any type becomes a dict; tuples, named tuples and lists keep their type; everything else is a leaf.
`torch.utils._pytree` matches only exact types (a BatchEncoding is a leaf for it) and is five times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

TreePath = tuple[Any, ...]  # the keys and positions from the root of a tree to a leaf


def map_leaves(
    tree: Any,
    change: Callable[[TreePath, Any], Any],
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
    is_plain: bool = False,
) -> Any:
    """The tree with `change(path, leaf)` in place of each leaf.

    `is_leaf` selects containers to be treated as leaves. With `is_plain`, subclasses of tuple and list are not kept.
    """

    def walk(path: TreePath, node: Any) -> Any:
        if isinstance(node, torch.Tensor) or is_leaf(node):
            return change(path, node)
        if isinstance(node, Mapping):
            return {key: walk((*path, key), value) for key, value in node.items()}
        if not isinstance(node, (tuple, list)):
            return change(path, node)
        values = [walk((*path, place), value) for place, value in enumerate(node)]
        if is_plain:
            return tuple(values) if isinstance(node, tuple) else values
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)

    return walk((), tree)


def leaves_in(tree: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> list[tuple[TreePath, Any]]:
    """Every leaf of a tree with its path, in order."""
    leaves: list[tuple[TreePath, Any]] = []
    map_leaves(tree, lambda *leaf: leaves.append(leaf), is_leaf=is_leaf, is_plain=True)
    return leaves


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a tree, in order. It is called for each step of a CUDA graph, so it builds no paths."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [tensor for value in tree if value is not None for tensor in tensors_in(value)]
    return tensors_in(list(tree.values())) if isinstance(tree, Mapping) else []


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with every tensor changed, except for the `batch_sizes` of packed sequences, which stay on the host."""
    # Most batches are flat, and the general walk would be noticeable in the short steps of tiny models.
    if type(tree) is tuple and set(map(type, tree)) == {torch.Tensor}:
        return tuple(map(change, tree))
    if type(tree) is dict and set(map(type, tree.values())) == {torch.Tensor}:
        return {key: change(tensor) for key, tensor in tree.items()}

    def change_leaf(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            data, sizes, *indices = leaf
            return PackedSequence(change(data), sizes, *(each if each is None else change(each) for each in indices))
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(tree, change_leaf, is_leaf=lambda node: isinstance(node, PackedSequence))


def to_channels_last(batch: Any) -> Any:
    """The batch with its images (floats of four dimensions) in channels-last memory format."""
    return map_tensors(batch, _image_to_channels_last)


def _image_to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.ndim == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor
