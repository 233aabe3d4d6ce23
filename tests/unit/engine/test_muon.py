from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.engine.muon import Muon, orthogonal


class Small(nn.Module):
    """Filters, matrices of which two have the same shape, an embedding and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.filters = nn.Embedding(5, 4), nn.Conv2d(2, 6, 3)
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)


def with_gradients(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    model = Small()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_it_is_public() -> None:
    assert paceline.Muon is Muon


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 16), (1, 16, 4)])
def test_singular_values_are_close_to_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    values = torch.linalg.svdvals(orthogonal(matrices, 5))
    assert values.max() < 1.3
    assert values.median() > 0.6
    assert torch.linalg.svdvals(matrices).max() < 0.02  # they were far from it


def test_filters_and_matrices_go_by_muon_and_all_else_by_the_rest() -> None:
    model = with_gradients()
    hidden, rest = Muon.groups_of(model)
    assert {id(p) for p in hidden["params"]} == {id(m.weight) for m in (model.filters, model.one, model.two)}
    assert len(rest["params"]) == len(list(model.parameters())) - 3
    model.one.weight = nn.Parameter(model.words.weight.detach())
    model.one.weight = model.words.weight  # as in models that share their embedding with the last layer
    assert len(Muon.groups_of(model)[0]["params"]) == 2


def test_plain_parameters_are_split_by_their_dimensions() -> None:
    hidden, rest = Muon(nn.Linear(3, 2).parameters()).param_groups
    assert (hidden["use_muon"], rest["use_muon"]) == (True, False)
    assert (hidden["lr"], rest["lr"]) == (0.02, 1e-3)


def test_a_step_is_the_textbook_step() -> None:
    """Written here once more, one matrix after the other; the rest by torch's own AdamW."""
    model = with_gradients()
    twin = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    optimizer = Muon(
        Muon.groups_of(model), lr=0.1, momentum=0.9, weight_decay=0.5, rest={"lr": 0.01, "weight_decay": 0.2}
    )
    adamw = torch.optim.AdamW(
        [p for name, p in twin.named_parameters() if p.ndim < 2 or "words" in name],
        lr=0.01, betas=(0.9, 0.95), weight_decay=0.2,
    )  # fmt: skip
    momenta: dict[str, torch.Tensor] = {}
    for _ in range(3):
        optimizer.step()
        adamw.step()
        for name, layer in (("filters", twin.filters), ("one", twin.one), ("two", twin.two)):
            gradient = layer.weight.grad.flatten(1)
            momenta[name] = 0.9 * momenta.get(name, torch.zeros_like(gradient)) + 0.1 * gradient
            update = 0.1 * gradient + 0.9 * momenta[name]
            rows, columns = update.shape
            x = update / update.norm()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x * max(1, rows / columns) ** 0.5
            layer.weight.data = layer.weight.data * (1 - 0.1 * 0.5) - 0.1 * x.reshape(layer.weight.shape)
    torch.testing.assert_close(weights_of(model), weights_of(twin), rtol=1e-4, atol=1e-5)


def test_the_rest_may_go_by_sgd_with_nesterov_momentum() -> None:
    layers = nn.Linear(3, 2), nn.Linear(3, 2)
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = (
        Muon([{"params": layers[0].parameters(), "use_muon": False}], rest={"name": "sgd", "lr": 0.1, "momentum": 0.8}),
        torch.optim.SGD(layers[1].parameters(), lr=0.1, momentum=0.8, nesterov=True),
    )
    for step in range(3):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, 0.3 * step - 0.2)
            optimizer.step()
    torch.testing.assert_close(*map(weights_of, layers))


@pytest.mark.parametrize("rest", [{}, {"name": "sgd"}])
def test_found_inf_leaves_everything_as_it_was_to_the_bit(rest: dict[str, Any]) -> None:
    model = with_gradients()
    optimizer = Muon(Muon.groups_of(model), weight_decay=0.1, rest=rest)
    optimizer.step()
    weights, state = weights_of(model), copy.deepcopy(optimizer.state_dict()["state"])
    for parameter in model.parameters():
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, weights_of(model), weights))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[place][key], value) for place, kept in state.items() for key, value in kept.items())
    optimizer.found_inf = torch.zeros(())
    for parameter in model.parameters():
        parameter.grad.fill_(0.1)
    optimizer.step()
    assert not any(map(torch.equal, weights_of(model), weights))


def test_a_first_step_that_is_skipped_leaves_no_trace() -> None:
    outcomes = []
    for skips in (False, True):
        model = with_gradients()
        optimizer = Muon(Muon.groups_of(model), rest={"name": "sgd"})
        if skips:
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            optimizer.found_inf = torch.zeros(())
        optimizer.step()
        outcomes.append(weights_of(model))
    assert all(map(torch.equal, *outcomes))


def test_gradients_are_divided_by_their_scale() -> None:
    outcomes = []
    for scale in (1.0, 1024.0):
        model = with_gradients()
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        optimizer = Muon(Muon.groups_of(model))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        optimizer.step()
        outcomes.append(weights_of(model))
    assert all(map(torch.equal, *outcomes))


def test_a_rate_may_be_a_tensor() -> None:
    outcomes = []
    for make in (float, torch.tensor):
        model = with_gradients()
        optimizer = Muon(Muon.groups_of(model), weight_decay=0.1)
        for group in optimizer.param_groups:
            group["lr"] = make(0.25)  # exact in 32 bits
        optimizer.step()
        outcomes.append(weights_of(model))
    torch.testing.assert_close(*outcomes)


def test_the_layout_of_filters_changes_no_bit() -> None:
    outcomes = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = with_gradients()
        model.filters.weight.data = model.filters.weight.data.contiguous(memory_format=layout)
        model.filters.weight.grad = model.filters.weight.grad.contiguous(memory_format=layout)
        optimizer = Muon(Muon.groups_of(model))
        optimizer.step()
        optimizer.step()
        outcomes.append(weights_of(model))
    assert all(map(torch.equal, *outcomes))


def test_a_loaded_state_continues_to_the_same_bits() -> None:
    model = with_gradients()
    optimizer = Muon(Muon.groups_of(model))
    optimizer.step()
    twin = copy.deepcopy(model)
    other = Muon(Muon.groups_of(twin))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, mirrored in zip(model.parameters(), twin.parameters(), strict=True):
        mirrored.grad = parameter.grad
    optimizer.step()
    other.step()
    assert all(map(torch.equal, weights_of(model), weights_of(twin)))


def test_parameters_without_gradients_stay() -> None:
    model = with_gradients()
    model.one.weight.grad = None
    before = model.one.weight.detach().clone()
    Muon(Muon.groups_of(model), weight_decay=0.1).step()
    assert torch.equal(model.one.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rest": {"name": "lion"}}, "rest.name='lion' is not known; use adamw or sgd"),
        ({"rest": {"momentum": 0.9}}, "rest.momentum is not a setting of adamw; use lr, betas, eps, weight_decay"),
        ({"ns_steps": 0}, "ns_steps >= 1"),
    ],
)
def test_wrong_settings_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([torch.zeros(2, 2)], **options)


def test_vectors_in_a_group_for_muon_are_refused() -> None:
    with pytest.raises(ValueError, match="use_muon=False"):
        Muon([{"params": [torch.zeros(3)]}])
