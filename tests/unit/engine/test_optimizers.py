from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import Muon
from paceline.config import Config
from paceline.engine.optimizers import can_skip, lrs_of, make_optimizer, optimizers, problems_with, set_lr
from paceline.errors import ConfigError

MakeConfig = Callable[..., Config]


# --- optimizers by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW"])
def test_optimizers_are_found_however_they_are_written(name: str, make_config: MakeConfig) -> None:
    optimizer = make_optimizer(make_config(optimizer={"name": name}), torch.nn.Linear(2, 1))
    assert type(optimizer) is torch.optim.AdamW


def test_the_optimizer_gets_its_rate_and_its_further_keys(make_config: MakeConfig) -> None:
    config = make_config(optimizer={"name": "sgd", "lr": 0.25, "momentum": 0.5, "nesterov": True})
    [group] = make_optimizer(config, torch.nn.Linear(2, 1)).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.5, True)


def test_frozen_parameters_are_left_out(make_config: MakeConfig) -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    [group] = make_optimizer(make_config(), model).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight)]


def test_optimizer_fn_is_given_the_model(make_config: MakeConfig) -> None:
    model = torch.nn.Linear(2, 1)
    config = make_config(optimizer_fn=lambda model: torch.optim.SGD([model.bias], lr=0.5))
    [group] = make_optimizer(config, model).param_groups
    assert group["params"][0] is model.bias


def frozen_later(model: torch.nn.Linear) -> torch.optim.Optimizer:
    model.bias.requires_grad_(False)
    return torch.optim.SGD([model.weight], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_fn", "message"),
    [
        (lambda model: [], "optimizer_fn returned a list; it must return an Optimizer"),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "optimizer_fn returned LBFGS, which evaluates .* train_fn",
        ),
        (frozen_later, "optimizer_fn changed requires_grad of bias; do that in model_fn"),
        (lambda model: torch.optim.SGD([torch.zeros(1)], lr=0.1), "of other parameters; use those of the model"),
    ],
)
def test_an_unsuitable_optimizer_fn_is_an_error(make_config: MakeConfig, optimizer_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(make_config(optimizer_fn=optimizer_fn), torch.nn.Linear(2, 1))


def test_every_optimizer_of_torch_is_known_but_not_their_base_class() -> None:
    assert {"adamw", "sgd", "adam", "rmsprop", "lbfgs"} <= set(optimizers())
    assert "optimizer" not in optimizers()


def test_each_wrong_argument_is_one_problem() -> None:
    found = problems_with("sgd", {"momentun": 0.9, "lr": 1, "zzz": 3})
    assert found[0] == "optimizer.momentun is not an argument of SGD; did you mean optimizer.momentum?"
    assert found[1].startswith("optimizer.zzz is not an argument of SGD; use lr, momentum, ")
    assert len(found) == 2


def test_an_unknown_optimizer_near_to_nothing_lists_the_known_ones() -> None:
    [problem] = problems_with("zzzz", {})
    assert "known: " in problem
    assert "adamw" in problem


# --- kernels, and the rate as a tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_optimizers_that_can_are_fused(name: str, make_config: MakeConfig) -> None:
    [group] = make_optimizer(make_config(optimizer={"name": name}), torch.nn.Linear(2, 1)).param_groups
    assert group["fused"] is True


@pytest.mark.parametrize("choice", [{"foreach": True}, {"fused": False}, {"differentiable": True}])
def test_who_chooses_a_kernel_gets_it(choice: dict[str, bool], make_config: MakeConfig) -> None:
    [group] = make_optimizer(make_config(optimizer={"name": "adamw", **choice}), torch.nn.Linear(2, 1)).param_groups
    assert not group["fused"]
    assert choice.items() <= group.items()


@pytest.mark.parametrize(
    "model",
    [torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1, dtype=torch.complex64)],
    ids=["sparse", "complex"],
)
def test_what_no_fused_kernel_takes_is_not_fused(model: torch.nn.Module, make_config: MakeConfig) -> None:
    config = make_config(optimizer={"name": "sgd", "lr": 0.1})
    optimizer = make_optimizer(config, model)
    dtype = torch.long if isinstance(model, torch.nn.Embedding) else torch.complex64
    model(torch.ones(2, dtype=dtype)).abs().sum().backward()
    optimizer.step()


def test_optimizers_without_fused_kernels_are_as_they_were(make_config: MakeConfig) -> None:
    make_optimizer(make_config(optimizer={"name": "rmsprop"}), torch.nn.Linear(2, 1))


def test_muon_by_name_is_ours_with_its_own_rate(make_config: MakeConfig) -> None:
    config = make_config(optimizer={"name": "Muon", "rest": {"name": "sgd", "lr": 0.3}})
    optimizer = make_optimizer(config, torch.nn.Linear(2, 1))
    assert type(optimizer) is Muon
    assert lrs_of(optimizer) == [0.02, 0.3]
    assert config.optimizer.lr == 0.02
    assert make_config(optimizer={"name": "muon", "lr": 0.5}).optimizer.lr == 0.5


def test_wrong_settings_of_muon_are_config_mistakes() -> None:
    [problem] = problems_with("muon", {"rest": {"name": "lion"}})
    assert problem == "optimizer={name: muon, …} rest.name='lion' is not known; use adamw or sgd"
    [problem] = problems_with("muon", {"momentun": 0.9})
    assert problem == "optimizer.momentun is not an argument of Muon; did you mean optimizer.momentum?"


def test_rates_are_set_where_they_are_numbers_and_filled_where_they_are_tensors() -> None:
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([{"params": one.parameters()}, {"params": two.parameters()}], fused=True)
    tensor = torch.tensor(0.0)
    optimizer.param_groups[1]["lr"] = tensor
    set_lr(optimizer, [0.1, 0.2])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[1]["lr"] is tensor
    assert tensor.item() == pytest.approx(0.2)
    assert lrs_of(optimizer) == [0.1, 0.2]  # not what 32 bits make of it


def test_a_rate_that_has_not_changed_is_not_sent_again() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), fused=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    set_lr(optimizer, [0.2])
    before = optimizer.param_groups[0]["lr"]._version
    set_lr(optimizer, [0.2])
    assert optimizer.param_groups[0]["lr"]._version == before
    set_lr(optimizer, [0.3])
    assert optimizer.param_groups[0]["lr"]._version > before


def test_an_optimizer_on_the_cpu_is_skipped_by_its_caller() -> None:
    assert not can_skip(torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), fused=True))
    assert not can_skip(torch.optim.RMSprop(torch.nn.Linear(2, 1).parameters()))


def test_sgd_on_a_gpu_can_skip_once_its_momentum_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.optimizers._is_fused_on_gpu", lambda optimizer: True)
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9, dampening=0.5, fused=True)
    assert not can_skip(optimizer)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert can_skip(optimizer)
    del optimizer.state[layer.weight]  # as on a rank that does not own it
    assert not can_skip(optimizer)
    assert can_skip(optimizer, elsewhere={layer.weight})
    assert can_skip(torch.optim.SGD(layer.parameters(), fused=True))


def test_on_a_gpu_the_rate_is_a_tensor_and_momentum_is_there_from_the_start(
    monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig
) -> None:
    monkeypatch.setattr("paceline.engine.optimizers._is_fused_on_gpu", lambda optimizer: True)
    layer = torch.nn.Linear(2, 1)
    optimizer = make_optimizer(make_config(optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}), layer)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert lrs_of(optimizer) == [0.1]
    assert can_skip(optimizer)
    adamw = make_optimizer(make_config(), layer)
    assert adamw.param_groups[0]["capturable"] is True


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lbfgs", {}, "evaluates a batch several times"),
        ("adamw", {"weight_decay": -1}, "Invalid weight_decay value: -1"),
        ("sgd", {"fused": True, "foreach": True}, "cannot be `True` together"),
        ("muon", {"rest": "adamw"}, "rest='adamw' is not a section"),
        ("muon", {"rest": {"lr": -1}}, "rest.lr=-1 must be a number of at least 0"),
    ],
)
def test_wrong_settings_are_found_before_anything_starts(name: str, options: dict[str, Any], words: str) -> None:
    [problem] = problems_with(name, options)
    assert words in problem
