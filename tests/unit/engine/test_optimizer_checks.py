"""Schedulers and optimizers inside an optimizer: what the managed loop refuses, and what it may use."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from paceline.config import Config
from paceline.engine.optimizer_checks import inner_optimizers
from paceline.engine.optimizers import make_optimizer
from paceline.errors import ConfigError

MakeConfig = Callable[..., Config]
MakeScheduler = Callable[[Optimizer], Any]
kept: list[Any] = []  # as a module of the user's may keep its scheduler


@pytest.fixture(autouse=True)
def _keep_nothing() -> Iterator[None]:
    yield
    kept.clear()


def in_sequence(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "SequentialLR": in_sequence,
}


def make(make_config: MakeConfig, optimizer_fn: Callable[[torch.nn.Module], Any], **keys: Any) -> Optimizer:
    return make_optimizer(make_config(optimizer_fn=optimizer_fn, **keys), torch.nn.Linear(2, 1))


# --- schedulers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_refused_with_the_key_that_replaces_it(name: str, make_config: MakeConfig) -> None:
    def scheduled(model: torch.nn.Module) -> Optimizer:
        optimizer = AdamW(model.parameters(), lr=0.1)
        SCHEDULERS[name](optimizer)
        return optimizer

    with pytest.raises(ConfigError, match=r"optimizer_fn creates a learning rate scheduler, .* scheduler_fn\("):
        make(make_config, scheduled)


def as_attribute(optimizer: Optimizer) -> None:
    optimizer.scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)  # type: ignore[attr-defined]


def in_a_list(optimizer: Optimizer) -> None:
    kept.append(lr_scheduler.ReduceLROnPlateau(optimizer))


def with_its_dict(optimizer: Optimizer) -> None:
    in_a_list(optimizer)
    assert vars(kept[-1])  # from now on the dict refers to the optimizer, as always in Python 3.10


@pytest.mark.parametrize("keep", [as_attribute, in_a_list, with_its_dict])
def test_reduce_on_plateau_is_found_wherever_it_is_kept(
    keep: Callable[[Optimizer], None], make_config: MakeConfig
) -> None:
    def scheduled(model: torch.nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1)
        keep(optimizer)
        return optimizer

    with pytest.raises(ConfigError, match="creates a learning rate scheduler"):
        make(make_config, scheduled)


def test_a_rate_that_another_scheduler_has_set_is_refused(make_config: MakeConfig) -> None:
    def scheduled(model: torch.nn.Module) -> Optimizer:
        return SGD([{"params": [*model.parameters()], "initial_lr": 0.1}], lr=0.001)  # as timm's schedulers do

    with pytest.raises(ConfigError, match="creates a learning rate scheduler"):
        make(make_config, scheduled)


def test_a_state_that_was_saved_beside_a_scheduler_may_be_loaded(make_config: MakeConfig) -> None:
    model = torch.nn.Linear(2, 1)
    earlier = AdamW(model.parameters(), lr=0.1)
    SCHEDULERS["CosineAnnealingLR"](earlier)
    model(torch.ones(2)).sum().backward()
    earlier.step()
    saved = copy.deepcopy(earlier.state_dict())

    def loaded(model: torch.nn.Module) -> Optimizer:
        optimizer = AdamW(model.parameters(), lr=0.1)
        optimizer.load_state_dict(saved)
        return optimizer

    assert "initial_lr" in make(make_config, loaded).param_groups[0]


# --- optimizers inside an optimizer -------------------------------------------------------------------------


class Lookahead(Optimizer):
    """As in timm: groups and state are those of the base, and so is the state dict."""

    def __init__(self, base: Optimizer) -> None:
        # Not Optimizer.__init__, on purpose.
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, {}, defaultdict(dict)
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class LookaheadByName(Lookahead):
    """As in older packages: its state dict has names of its own, and it keeps the groups that it had."""

    def state_dict(self) -> dict[str, Any]:
        base = self.base.state_dict()
        return {"fast_state": base["state"], "param_groups": base["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict({"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]})


class Sam(Optimizer):
    """Takes its base's groups, and leaves the base's state out of its own."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups


class Several(Optimizer):
    """One after the other, each with parameters of its own."""

    def __init__(self, *optimizers: Optimizer, has_own_groups: bool = False) -> None:
        self.optimizers = {"all": list(optimizers)}
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {"lr": 1})
        if not has_own_groups:
            self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for each in self.optimizers["all"] for group in each.param_groups]


class SeveralSaved(Several):
    """Saves and restores all of them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": [each.state_dict() for each in self.optimizers["all"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.optimizers["all"], state_dict["inner"], strict=True):
            each.load_state_dict(state)
        self._share_groups()


def two_of(model: torch.nn.Module) -> tuple[Optimizer, Optimizer]:
    return Adam([model.weight], lr=0.1), SGD([model.bias], lr=0.2, momentum=0.9)


NO_STATE = "whose state is missing in its state_dict and load_state_dict; return one optimizer .* train_fn"


@pytest.mark.parametrize(
    ("optimizer_fn", "reported"),
    [
        (lambda m: Sam(m.parameters(), lr=0.1), rf"a Sam, which contains another optimizer \(SGD\), {NO_STATE}"),
        (lambda m: LookaheadByName(Adam(m.parameters())), r"LookaheadByName, .* state_dict lacks state; add"),
        (lambda m: Several(*two_of(m), has_own_groups=True), r"\(Adam, SGD\) with its own param_groups, so"),
        (lambda m: Several(*two_of(m)), rf"\(Adam, SGD\), {NO_STATE}"),
        (lambda m: Lookahead(Several(*two_of(m))), rf"\(Adam, SGD, Several\), {NO_STATE}"),
    ],
)  # fmt: skip
def test_an_inner_optimizer_that_would_be_missed_is_refused(
    optimizer_fn: Any, reported: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=reported):
        make(make_config, optimizer_fn)


@pytest.mark.parametrize(
    "optimizer_fn", [lambda m: Lookahead(Adam(m.parameters())), lambda m: SeveralSaved(*two_of(m))]
)
def test_an_optimizer_that_shares_groups_and_saves_all_state_is_taken_as_it_was(
    optimizer_fn: Any, make_config: MakeConfig
) -> None:
    optimizer = make(make_config, optimizer_fn)
    for each in (optimizer, *inner_optimizers(optimizer)):
        assert each.state == {}
    for group in optimizer.param_groups:
        group["lr"] = 0.7
    assert all(group["lr"] == 0.7 for each in inner_optimizers(optimizer) for group in each.param_groups)


def test_a_scheduler_of_an_inner_optimizer_is_refused(make_config: MakeConfig) -> None:
    def scheduled(model: torch.nn.Module) -> Optimizer:
        base = Adam(model.parameters())
        SCHEDULERS["LambdaLR"](base)
        return Lookahead(base)

    with pytest.raises(ConfigError, match="creates a learning rate scheduler"):
        make(make_config, scheduled)


def test_state_of_inner_optimizers_is_not_sharded(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"Lookahead, which .* shard_optimizer=true cannot divide their state; set"):
        make(make_config, lambda model: Lookahead(Adam(model.parameters())), shard_optimizer=True)
