"""Trees of tensors: what is a container, what is a leaf, and what types the results have."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.data.trees import leaves_in, map_leaves, map_tensors, tensors_in, to_channels_last


class Pair(NamedTuple):
    left: Any
    right: Any


class Row(list):  # type: ignore[type-arg]
    """A list of a library's own type."""


def test_trees_are_walked_in_one_order_and_keep_their_form() -> None:
    tensors = [torch.tensor(number) for number in range(6)]
    tree = {"a": [tensors[0], None, "text"], "b": Pair(tensors[1], {"c": (tensors[2], 3)}), "d": (tensors[3],)}
    tree["e"] = OrderedDict(f=tensors[4], g=Pair(None, [tensors[5]]))
    assert [tensor.item() for tensor in tensors_in(tree)] == list(range(6))
    changed = map_tensors(tree, lambda tensor: tensor + 10)
    assert [tensor.item() for tensor in tensors_in(changed)] == list(range(10, 16))
    assert type(changed["b"]) is Pair
    assert changed["b"].right["c"][1] == 3
    assert changed["a"][1:] == [None, "text"]
    assert changed["e"]["g"].left is None
    assert [type(value) for value in changed.values()] == [list, Pair, tuple, dict]


def test_nothing_is_a_tree_without_tensors() -> None:
    assert tensors_in(None) == tensors_in("text") == tensors_in([]) == tensors_in({"a": None}) == []
    assert map_tensors(None, torch.neg) is None
    assert map_tensors((), torch.neg) == ()


@pytest.mark.parametrize(
    ("make", "kind"), [(tuple, tuple), (list, list), (Row, Row), (lambda values: Pair(*values), Pair)]
)
@pytest.mark.parametrize("second", [torch.ones(1), torch.nn.Parameter(torch.ones(1)), "text", None])
def test_sequences_keep_their_type_whatever_they_hold(make: Any, kind: type, second: Any) -> None:
    changed = map_tensors(make([torch.zeros(1), second]), lambda tensor: tensor.detach() + 1)
    assert type(changed) is kind
    assert changed[0] == 1
    assert changed[1] == 2 if isinstance(second, torch.Tensor) else changed[1] is second


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict])  # transformers' BatchEncoding is a UserDict
@pytest.mark.parametrize("extra", [{}, {"note": "text"}])
def test_mappings_of_any_type_become_dicts(make: Any, extra: dict[str, str]) -> None:
    changed = map_tensors(make({"x": torch.zeros(1), "y": torch.ones(1), **extra}), lambda tensor: tensor + 1)
    assert type(changed) is dict
    assert changed == {"x": torch.ones(1), "y": torch.full((1,), 2.0), **extra}


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_host() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    moved = map_tensors([packed], lambda tensor: tensor.to("meta"))[0]
    assert type(moved) is PackedSequence
    assert [moved.data.is_meta, moved.batch_sizes.is_meta, moved.sorted_indices.is_meta] == [True, False, True]
    in_order = map_tensors(pack_sequence([torch.ones(3), torch.ones(1)]), lambda tensor: tensor + 1)
    assert in_order.sorted_indices is None
    assert in_order.data.tolist() == [2] * 4
    assert [tensor.tolist() for tensor in tensors_in(packed)[:2]] == [[1] * 4, [2, 1, 1]]


def test_leaves_have_paths_of_keys_and_places() -> None:
    tree = {"a": [1, Pair(2, None)], 3: {}, "b": UserDict({"c": "text"})}
    assert leaves_in(tree) == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1), None), (("b", "c"), "text")]
    assert leaves_in(5) == [((), 5)]
    assert leaves_in(tree, is_leaf=lambda node: isinstance(node, list))[0] == (("a",), tree["a"])


def test_plain_trees_have_no_types_of_other_libraries() -> None:
    plain = map_leaves({"a": Pair(1, Row([2]))}, lambda path, leaf: leaf + len(path), is_plain=True)
    assert plain == {"a": (3, [5])}
    assert type(plain["a"]) is tuple
    assert type(plain["a"][1]) is list


def test_only_images_become_channels_last() -> None:
    images, masks = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    changed = to_channels_last({"images": images, "masks": [masks, torch.zeros(2)]})
    assert changed["images"].is_contiguous(memory_format=torch.channels_last)
    assert changed["masks"][0] is masks
