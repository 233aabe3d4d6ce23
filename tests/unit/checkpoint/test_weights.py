"""checkpoint/weights.py: the file of weights that a run writes at its end, for models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.checkpoint.weights import PICKLED, load_weights, save_weights, stored_sha256
from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError
from support.models import Tied


class Odd(nn.Module):
    """A layer, and something in its state dict that is not a contiguous tensor of a common dtype."""

    def __init__(self, add: Callable[[Odd], None], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.extra = nn.Linear(3, 2), None
        add(self)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def row_of_a_table(model: Odd) -> None:
    model.register_buffer("row", torch.randn(3, 8)[1])


def overlapping_views(model: Odd) -> None:
    table = torch.randn(20)
    model.register_buffer("left", table[:12])
    model.register_buffer("right", table[8:])


def views_of_one_buffer(model: Odd) -> None:
    flat = torch.randn(12)
    model.first, model.second = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2))


def tied(model: Odd) -> None:
    model.head = nn.Linear(3, 2)
    model.head.weight = model.layer.weight


def tied_views(model: Odd) -> None:
    row_of_a_table(model)
    model.register_buffer("twin", model.row)


def transposed(model: Odd) -> None:
    model.register_buffer("transposed", torch.randn(2, 5).t())


def complex128(model: Odd) -> None:
    model.register_buffer("wide", torch.randn(4, dtype=torch.complex128))


def extra_state(model: Odd) -> None:
    model.extra = {"calls": 3 if torch.randn(1) else 0, "names": ["a"], "scale": torch.randn(2)}


def sparse(model: Odd) -> None:
    model.register_buffer("links", torch.randn(3, 3).to_sparse())


CASES = [
    row_of_a_table, overlapping_views, views_of_one_buffer, tied, tied_views, transposed, complex128, extra_state,
    sparse,
]  # fmt: skip


@pytest.mark.parametrize("add", CASES)
def test_saved_weights_load_into_an_equal_model(add: Callable[[Odd], None], tmp_path: Path) -> None:
    model, other, path = Odd(add), Odd(add, seed=1), tmp_path / "weights.safetensors"
    written = save_weights(model, path)
    assert written == stored_sha256(path) == sha256_of(model.state_dict())
    assert sha256_of(other.state_dict()) != written
    load_weights(other, path)
    assert sha256_of(other.state_dict()) == written
    assert str(other.extra) == str(model.extra)
    assert [each.name for each in tmp_path.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("add", CASES)
def test_safetensors_reads_the_tensors(add: Callable[[Odd], None], tmp_path: Path) -> None:
    model, path = Odd(add), tmp_path / "weights.safetensors"
    save_weights(model, path)
    found = safetensors.torch.load_file(path)
    assert {"layer.weight", "layer.bias"} <= found.keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())


def test_tied_weights_are_stored_once_and_safetensors_ties_them_again(tmp_path: Path) -> None:
    model, other, path = Tied(), Tied(), tmp_path / "weights.safetensors"
    save_weights(model, path)
    assert sorted(safetensors.torch.load_file(path)) == ["first.weight", "norm.bias", "norm.weight"]
    safetensors.torch.load_model(other, path)
    assert sha256_of(other.state_dict()) == sha256_of(model.state_dict())


def test_a_model_that_does_not_fit_is_refused_with_the_differences(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(nn.Linear(3, 2), path)
    with pytest.raises(ConfigError, match=r"weight is \(2, 3\) as saved and \(2, 5\) in the model; use the model"):
        load_weights(nn.Linear(5, 2), path)
    with pytest.raises(ConfigError, match="does not fit the model: the model has no bias; use the model that was"):
        load_weights(nn.Linear(3, 2, bias=False), path)


def test_damaged_pickled_values_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(Odd(extra_state), path)
    content = path.read_bytes()
    start = content.index(PICKLED.encode()) + 40
    path.write_bytes(content[:start] + b"!!!!" + content[start + 4 :])
    with pytest.raises(OSError, match=f"weights.safetensors: {PICKLED} in its metadata is damaged"):
        load_weights(Odd(extra_state), path)


class Custom:
    """A class that `torch.load(weights_only=True)` refuses."""


def test_values_that_cannot_be_read_back_are_left_out_with_a_warning(tmp_path: Path) -> None:
    def add(model: Odd) -> None:
        model.extra = Custom()

    model, other, path = Odd(add), Odd(extra_state, seed=1), tmp_path / "weights.safetensors"
    with pytest.warns(UserWarning, match="_extra_state of the model's state cannot be saved"):
        save_weights(model, path)
    load_weights(other, path)
    assert torch.equal(other.layer.weight, model.layer.weight)
    assert other.extra["names"] == ["a"]
