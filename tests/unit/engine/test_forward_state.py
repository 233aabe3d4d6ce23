from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.engine.forward_state import ForwardState, Snapshot


def norm() -> Any:
    return nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))


def shapes(buffers: ForwardState) -> list[tuple[int, ...]]:
    return [tuple(buffer.shape) for buffer in buffers.tensors().values()]


def test_each_buffer_is_found_once_wherever_it_is_held() -> None:
    model = norm()
    model.again, model[1].running_mean = model[0], model[1].running_var
    assert [id(buffer) for buffer in ForwardState(model).tensors().values()] == [
        id(buffer) for buffer in model.buffers()
    ]
    assert len(ForwardState(model).tensors()) == 5


def test_what_a_forward_puts_in_a_buffers_place_is_found() -> None:
    model = norm()
    buffers = ForwardState(model)
    buffers.tensors()
    model[0].register_buffer("new", torch.zeros(1))  # made by the first forward
    assert len(buffers.tensors()) == 7
    model[0].running_mean = torch.ones(4)
    model[1].running_var = None
    assert shapes(buffers) == [(4,), (2,), (), (1,), (3,), ()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # people still have such models
def test_torchscript_has_buffers_too() -> None:
    assert shapes(ForwardState(torch.jit.script(norm()))) == [(2,), (2,), (), (3,), (3,), ()]


def test_sparse_buffers_are_left_alone() -> None:
    model = nn.Module()
    model.register_buffer("links", torch.eye(3).to_sparse())
    assert ForwardState(model).tensors() == {}


class Holder(nn.Module):
    """Holds buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in {
            "numbers": torch.randn(3), "count": torch.tensor(4), "flags": torch.ones(2, dtype=torch.bool),
            "turned": torch.randn(2, 3).t(), "more": torch.randn(2),
        }.items():  # fmt: skip
            self.register_buffer(name, tensor)


def test_copies_bring_every_type_back_into_the_same_memory() -> None:
    model, copies = Holder(), Snapshot()
    buffers = ForwardState(model)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    places = [buffer.data_ptr() for buffer in model.buffers()]
    copies.take(buffers.tensors())
    memory = [copy.data_ptr() for _, copy in copies.same_shape(buffers.tensors())]
    for buffer in model.buffers():
        buffer.zero_()
    copies.restore(buffers.tensors())
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert [buffer.data_ptr() for buffer in model.buffers()] == places
    copies.take(buffers.tensors())
    assert [copy.data_ptr() for _, copy in copies.same_shape(buffers.tensors())] == memory


def test_a_buffer_that_has_another_shape_gets_its_own_back_unless_it_is_a_cache() -> None:
    model, copies = nn.Module(), Snapshot()
    model.register_buffer("queue", torch.arange(3.0))
    model.register_buffer("cache", torch.arange(2.0), persistent=False)
    buffers = ForwardState(model)
    copies.take(buffers.tensors())
    model.queue, model.cache = torch.zeros(5), torch.ones(7)
    copies.restore(buffers.tensors())
    assert model.queue.tolist() == [0.0, 1.0, 2.0]
    assert model.cache.tolist() == [1.0] * 7


def test_a_buffer_that_a_forward_fills_is_not_taken_for_another() -> None:
    model, copies = norm(), Snapshot()
    model[0].register_buffer("mask", None)
    buffers = ForwardState(model)
    copies.take(buffers.tensors())
    model[0].mask = torch.tensor([True, False])
    model[0].running_mean.fill_(5.0)
    copies.restore(buffers.tensors())
    assert model[0].mask.tolist() == [True, False]
    assert model[0].running_mean.tolist() == [0.0, 0.0]
    assert model[0].running_var.tolist() == [1.0, 1.0]
