from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.buffers import Buffers, Copies


def norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))


def test_each_buffer_is_found_once_wherever_it_is_held() -> None:
    model = norm()
    model.again, model[1].running_mean = model[0], model[1].running_var
    assert [id(buffer) for buffer in Buffers(model).live()] == [id(buffer) for buffer in model.buffers()]
    assert len(Buffers(model).live()) == 5


def test_what_a_forward_puts_in_a_buffers_place_is_found() -> None:
    model = norm()
    buffers = Buffers(model)
    buffers.live()
    model[0].register_buffer("new", torch.zeros(1))  # made by the first forward
    assert len(buffers.live()) == 7
    model[0].running_mean = torch.ones(4)
    model[1].running_var = None
    assert [tuple(buffer.shape) for buffer in buffers.live()] == [(4,), (2,), (), (1,), (3,), ()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # people still have such models
def test_torchscript_has_buffers_too() -> None:
    scripted = torch.jit.script(norm())
    assert [tuple(buffer.shape) for buffer in Buffers(scripted).live()] == [(2,), (2,), (), (3,), (3,), ()]


def test_copies_bring_every_type_back_into_the_same_memory() -> None:
    live = [torch.randn(3), torch.tensor(4), torch.ones(2, dtype=torch.bool), torch.randn(2, 3).t(), torch.randn(2)]
    kept = [tensor.clone() for tensor in live]
    places = [tensor.data_ptr() for tensor in live]
    copies = Copies()
    copies.take(live)
    memory = [tensor.data_ptr() for tensor in copies.tensors]
    for tensor in live:
        tensor.zero_()
    copies.put_back(live)
    assert all(torch.equal(left, right) for left, right in zip(live, kept, strict=True))
    assert [tensor.data_ptr() for tensor in live] == places
    copies.take(live)
    assert [tensor.data_ptr() for tensor in copies.tensors] == memory


def test_copies_bring_the_shape_back() -> None:
    copies = Copies()
    copies.take([torch.arange(3.0), torch.tensor(1)])
    other = torch.zeros(5)
    copies.put_back([other, torch.tensor(2), torch.zeros(2)])  # the last was not there
    assert other.tolist() == [0.0, 1.0, 2.0]
    copies.take([torch.zeros(4)])
    assert [tuple(tensor.shape) for tensor in copies.tensors] == [(4,)]
