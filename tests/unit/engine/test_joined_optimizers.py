"""Several optimizers as one: their groups, states and state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.engine.digest import sha256_of_optimizer
from paceline.engine.joined_optimizers import JoinedOptimizers
from paceline.engine.schedule import LearningRates
from paceline.errors import ConfigError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def joined(net: nn.Sequential) -> JoinedOptimizers:
    """The first layer has two groups, and belongs to both optimizers."""
    first = [{"params": [net[0].weight]}, {"params": [net[0].bias], "lr": 0.5}]
    return JoinedOptimizers(
        {"a": torch.optim.SGD(first, lr=0.1, momentum=0.9), "b": torch.optim.AdamW(net.parameters())}
    )


def update(net: nn.Sequential, optimizers: JoinedOptimizers) -> None:
    for optimizer in optimizers.by_phase.values():
        optimizers.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def test_a_restored_state_continues_to_the_same_bits() -> None:
    net, other = model(), model()
    ours, theirs = joined(net), joined(other)
    update(net, ours)
    saved = copy.deepcopy(ours.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2, 3, 4, 5]]
    assert sorted(saved["state"]) == [0, 1, 2, 3, 4, 5]
    other.load_state_dict(net.state_dict())
    theirs.load_state_dict(saved)
    assert [group["lr"] for group in theirs.param_groups] == [0.1, 0.5, 1e-3]
    for pair in ((net, ours), (other, theirs)):
        update(*pair)
    assert sha256_of_optimizer(ours) == sha256_of_optimizer(theirs)
    assert all(torch.equal(*pair) for pair in zip(net.parameters(), other.parameters(), strict=True))


def test_learning_rates_are_set_in_the_groups_of_all_also_after_a_state_was_loaded() -> None:
    net = model()
    optimizers = joined(net)
    optimizers.load_state_dict(optimizers.state_dict())
    assert LearningRates(optimizers, lambda step: 0.5).apply(0) == 0.05
    assert [group["lr"] for each in optimizers.by_phase.values() for group in each.param_groups] == [0.05, 0.25, 5e-4]


def test_a_state_of_other_phases_is_refused() -> None:
    optimizers = joined(model())
    saved = optimizers.state_dict()
    for group in saved["param_groups"][:2]:
        group["phase"] = "z"
    with pytest.raises(ConfigError, match="the phase a is z in the checkpoint; keep the phases and their order"):
        optimizers.load_state_dict(saved)
