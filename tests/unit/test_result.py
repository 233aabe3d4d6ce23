from __future__ import annotations

import hashlib
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import result
from paceline.result import Result, weights_sha256
from paceline.run_folder import RunFolder

FACTS: dict[str, Any] = {
    "metrics": {"val_loss": 0.5},
    "history": [],
    "step": 7,
    "epoch": 2,
    "world_size": 2,
    "lanes": 4,
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


# --- weights_sha256 -----------------------------------------------------------------------------------------


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
    assert weights_sha256(state) == written.hexdigest()


def test_the_hash_of_a_known_state_is_the_same_in_every_version() -> None:
    state = {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "steps": torch.tensor(7)}
    assert weights_sha256(state) == "9d0ec05ef1d10923949c2a28c212731b66c0bf8ad685b1a34b0db36bbea014d7"


def test_the_hash_does_not_depend_on_the_order_or_the_layout_of_tensors() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert weights_sha256({"a": tensor, "b": torch.ones(1)}) == weights_sha256({"b": torch.ones(1), "a": transposed})


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
    assert weights_sha256(other) != weights_sha256({"a": torch.tensor([1.0, 2.0], dtype=torch.float64)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert weights_sha256({"a": ones}) == weights_sha256({"a": ones.clone()})
    assert weights_sha256({"a": ones}) != weights_sha256({"a": zeros})


def test_what_is_no_tensor_is_left_out() -> None:
    assert weights_sha256({"a": torch.ones(2), "extra": {"x": 1}}) == weights_sha256({"a": torch.ones(2)})


def test_the_hash_neither_needs_nor_keeps_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert weights_sha256({"a": parameter}) == weights_sha256({"a": parameter.detach()})
    assert parameter.requires_grad


# --- from rank 0 to the caller ------------------------------------------------------------------------------


def written(tmp_path: Path, model: nn.Module, value: Any) -> Result:
    folder = RunFolder(tmp_path)
    result.write(folder, model, value, **FACTS)
    return result.collect(folder).to_result(make_model)


def test_what_rank_0_leaves_is_what_start_returns(tmp_path: Path) -> None:
    model = make_model()
    returned = written(tmp_path, model, {"accuracy": 0.9})
    assert returned.run_dir == tmp_path
    assert returned.value == {"accuracy": 0.9}
    assert {key: getattr(returned, key) for key in FACTS} == FACTS
    assert returned.weights_sha256 == weights_sha256(model.state_dict())
    assert returned.versions["torch"] == torch.__version__


def test_the_model_comes_back_with_its_weights_and_buffers(tmp_path: Path) -> None:
    model = make_model()
    model(torch.randn(8, 3))  # moves BatchNorm's statistics
    loaded = written(tmp_path, model, None).load_model()
    assert loaded is not model
    assert weights_sha256(loaded.state_dict()) == weights_sha256(model.state_dict())


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight

    model = Tied()
    folder = RunFolder(tmp_path)
    result.write(folder, model, None, **FACTS)
    loaded = result.collect(folder).to_result(Tied).load_model()
    assert weights_sha256(loaded.state_dict()) == weights_sha256(model.state_dict())


def test_without_a_value_there_is_none(tmp_path: Path) -> None:
    assert written(tmp_path, make_model(), None).value is None


def test_values_of_the_users_own_classes_come_back(tmp_path: Path) -> None:
    class Score:
        right = 9

    assert written(tmp_path, make_model(), Score()).value.right == 9


def test_a_value_that_does_not_pickle_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"what train_fn returned does not pickle, so result\.value is None"):
        returned = written(tmp_path, make_model(), threading.Lock())
    assert returned.value is None
    assert returned.step == 7


def test_metrics_that_are_no_number_survive(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    result.write(folder, make_model(), None, **{**FACTS, "metrics": {"val_loss": math.nan}})
    assert math.isnan(result.collect(folder).to_result(make_model).metrics["val_loss"])


def test_nothing_half_written_stays_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    result.write(folder, make_model(), 3, **FACTS)
    assert set(tmp_path.iterdir()) == {folder.weights, folder.value, folder.result}
