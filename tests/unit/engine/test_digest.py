from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import nn

from paceline.engine.digest import digests_of, sha256_of


def test_the_hash_is_over_name_dtype_shape_and_bytes_in_name_order() -> None:
    state = {
        "b": torch.tensor([[1.5, -2.0]]),
        "a.weight": torch.tensor([1, 2, 3]),
        "c": torch.tensor(True),
        "empty": torch.zeros(0, 4),
    }
    written = hashlib.sha256()
    for line, tensor in (
        (b"a.weight torch.int64 (3,)\n", state["a.weight"]),
        (b"b torch.float32 (1, 2)\n", state["b"]),
        (b"c torch.bool ()\n", state["c"]),
        (b"empty torch.float32 (0, 4)\n", state["empty"]),
    ):
        written.update(line)
        written.update(tensor.numpy().tobytes())
    assert sha256_of(state) == written.hexdigest()


def test_the_hash_of_a_known_state_is_the_same_in_every_version() -> None:
    state = {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "steps": torch.tensor(7)}
    assert sha256_of(state) == "9d0ec05ef1d10923949c2a28c212731b66c0bf8ad685b1a34b0db36bbea014d7"


def test_the_hash_does_not_depend_on_the_order_or_the_layout_of_tensors() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert sha256_of({"a": tensor, "b": torch.ones(1)}) == sha256_of({"b": torch.ones(1), "a": transposed})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, math.nextafter(2.0, 3.0)], dtype=torch.float64)},
        {"b": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"a": torch.tensor([[1.0, 2.0]], dtype=torch.float64)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float32)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64).view(torch.int64)},
        {"a": torch.tensor([2.0, 1.0], dtype=torch.float64)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(0)},
    ],
    ids=["last bit", "name", "shape", "dtype", "same bytes", "order", "more"],
)
def test_any_difference_gives_another_hash(other: dict[str, torch.Tensor]) -> None:
    assert sha256_of(other) != sha256_of({"a": torch.tensor([1.0, 2.0], dtype=torch.float64)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert sha256_of({"a": ones}) == sha256_of({"a": ones.clone()})
    assert sha256_of({"a": ones}) != sha256_of({"a": zeros})


def test_what_is_no_tensor_is_left_out() -> None:
    assert sha256_of({"a": torch.ones(2), "extra": {"x": 1}}) == sha256_of({"a": torch.ones(2)})


def test_the_hash_neither_needs_nor_keeps_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert sha256_of({"a": parameter}) == sha256_of({"a": parameter.detach()})
    assert parameter.requires_grad


def test_complex_parameters_of_128_bits_have_a_digest() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex128)
    before = digests_of(model)
    with torch.no_grad():
        model.weight[1, 2] += 1e-12j
    assert (digests_of(model) != before).tolist() == [True, False]


def test_the_digest_of_a_parameter_changes_with_any_of_its_bits() -> None:
    model = nn.Linear(3, 2)
    before = digests_of(model)
    for bit in range(32):
        with torch.no_grad():
            model.weight.view(torch.int32)[1, 2] ^= 1 << bit if bit < 31 else -(1 << 31)
        changed = digests_of(model) != before
        assert changed.tolist() == [True, False]
        with torch.no_grad():
            model.weight.view(torch.int32)[1, 2] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert torch.equal(digests_of(model), before)
