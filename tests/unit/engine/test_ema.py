"""The average of the weights: of those that the model has, whatever their format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.engine.ema import Ema


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_bad", [None, torch.zeros(())])
def test_an_average_follows_weights_of_any_format(dtype: torch.dtype, is_bad: torch.Tensor | None) -> None:
    layer = nn.Linear(3, 2).to(dtype)
    first = layer.weight.detach().double().clone()
    ema = Ema(layer, 0.999)
    with torch.no_grad():
        layer.weight.add_(1.0)
    for _ in range(1000):
        ema.update(is_bad)
    wanted = first + (1 - 0.999**1000) * (layer.weight.detach().double() - first)
    assert torch.allclose(ema.averages()["weight"].double(), wanted, atol=1e-4)


def test_an_average_that_is_applied_is_not_rounded_by_it() -> None:
    layer = nn.Linear(3, 2).bfloat16()
    ema = Ema(layer, 0.9)
    own = layer.weight.detach().clone()
    ema.averages()["weight"].fill_(1.0001)
    with ema.applied():
        assert torch.equal(layer.weight, torch.ones_like(own))
    assert torch.equal(layer.weight, own)
    assert torch.equal(ema.averages()["weight"], torch.full((2, 3), 1.0001))
