"""The file of weights that a run ends with, for models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.checkpoint.weights import REST, load_weights, save_weights, stored_sha256
from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError


class Odd(nn.Module):
    """A layer, and something in its state that is not a whole tensor of a usual type."""

    def __init__(self, add: Callable[[Odd], None], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.extra = nn.Linear(3, 2), None
        add(self)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def part_of_a_table(model: Odd) -> None:
    model.register_buffer("row", torch.randn(3, 8)[1])


def parts_that_overlap(model: Odd) -> None:
    table = torch.randn(20)
    model.register_buffer("left", table[:12])
    model.register_buffer("right", table[8:])


def flat_parameters(model: Odd) -> None:
    flat = torch.randn(12)
    model.first, model.second = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2))


def tied(model: Odd) -> None:
    model.head = nn.Linear(3, 2)
    model.head.weight = model.layer.weight


def tied_parts(model: Odd) -> None:
    part_of_a_table(model)
    model.register_buffer("twin", model.row)


def turned(model: Odd) -> None:
    model.register_buffer("turned", torch.randn(2, 5).t())


def wide_complex(model: Odd) -> None:
    model.register_buffer("wide", torch.randn(4, dtype=torch.complex128))


def an_object(model: Odd) -> None:
    model.extra = {"calls": 3 if torch.randn(1) else 0, "names": ["a"], "scale": torch.randn(2)}


def sparse(model: Odd) -> None:
    model.register_buffer("links", torch.randn(3, 3).to_sparse())


KINDS = [
    part_of_a_table, parts_that_overlap, flat_parameters, tied, tied_parts, turned, wide_complex, an_object, sparse,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_comes_back_whole(kind: Callable[[Odd], None], tmp_path: Path) -> None:
    model, other, path = Odd(kind), Odd(kind, seed=1), tmp_path / "weights.safetensors"
    written = save_weights(model, path)
    assert written == stored_sha256(path) == sha256_of(model.state_dict())
    assert sha256_of(other.state_dict()) != written
    load_weights(other, path)
    assert sha256_of(other.state_dict()) == written
    assert str(other.extra) == str(model.extra)
    assert [each.name for each in tmp_path.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_readers_find_the_tensors(kind: Callable[[Odd], None], tmp_path: Path) -> None:
    model, path = Odd(kind), tmp_path / "weights.safetensors"
    save_weights(model, path)
    found = safetensors.torch.load_file(path)
    assert {"layer.weight", "layer.bias"} <= found.keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 2), nn.Linear(3, 2)
        self.head.weight = self.layer.weight


def test_tied_weights_are_there_once_and_the_library_ties_them_again(tmp_path: Path) -> None:
    model, other, path = Tied(), Tied(), tmp_path / "weights.safetensors"
    save_weights(model, path)
    assert sorted(safetensors.torch.load_file(path)) == ["head.bias", "layer.bias", "layer.weight"]
    safetensors.torch.load_model(other, path)
    assert sha256_of(other.state_dict()) == sha256_of(model.state_dict())


def test_another_model_is_told_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(nn.Linear(3, 2), path)
    with pytest.raises(ConfigError, match=r"weight is \(2, 3\) there and \(2, 5\) in the model; give the model"):
        load_weights(nn.Linear(5, 2), path)
    with pytest.raises(ConfigError, match="does not fit the model: the model has no bias; give the model that was"):
        load_weights(nn.Linear(3, 2, bias=False), path)


def test_what_is_no_tensor_is_told_when_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(Odd(an_object), path)
    content = path.read_bytes()
    start = content.index(REST.encode()) + 40
    path.write_bytes(content[:start] + b"!!!!" + content[start + 4 :])
    with pytest.raises(OSError, match=f"weights.safetensors: {REST} in its metadata is damaged"):
        load_weights(Odd(an_object), path)


class Own:
    """Nobody can read it back without its class."""


def test_what_could_not_be_read_back_is_left_out_with_a_warning_and_the_weights_are_written(tmp_path: Path) -> None:
    def add(model: Odd) -> None:
        model.extra = Own()

    model, other, path = Odd(add), Odd(an_object, seed=1), tmp_path / "weights.safetensors"
    with pytest.warns(UserWarning, match="_extra_state of the model's state cannot be saved"):
        save_weights(model, path)
    load_weights(other, path)
    assert torch.equal(other.layer.weight, model.layer.weight)
    assert other.extra["names"] == ["a"]
