from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.callbacks import Callback
from paceline.checkpoint.state import capture
from paceline.config import Config
from paceline.engine.optimizers import make_optimizer
from paceline.errors import ConfigError
from paceline.worker.callback_states import states_of
from paceline.worker.restore import LoadedCheckpoint, restore
from paceline.worker.state import EARLIER_NAMES, TrainState
from support.configs import settings_of

MakeConfig = Callable[..., Config]


def stepper_of(config: Config) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(config, model)
    return SimpleNamespace(
        model=model, optimizer=optimizer, settings=settings_of(config), ema=None, sharding=None,
        set_counters=lambda counters: None,
    )  # fmt: skip


def found(stepper: Any) -> Any:
    for parameter in stepper.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.optimizer.step()
    counters = {"loop": asdict(TrainState(step=1)), "stepper": {}}
    state = copy.deepcopy(capture(stepper.model, stepper.optimizer, None, counters))
    return LoadedCheckpoint(Path("c"), SimpleNamespace(), [], state)  # type: ignore[arg-type]


def test_each_group_resumes_with_the_settings_of_the_present_config(make_config: MakeConfig) -> None:
    """Muon's groups differ in their settings: those of one must not be set in the other."""
    rest = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "momentum": 0.5}
    before = stepper_of(make_config(optimizer={"name": "muon", "weight_decay": 0.1, "rest": rest}))
    config = make_config(optimizer={"name": "muon", "weight_decay": 0.3, "rest": {**rest, "momentum": 0.7}})
    after = stepper_of(config)
    train_state = restore(SimpleNamespace(), found(before), after, [])
    assert train_state.step == 1
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.3, 0.0]
    assert [group["momentum"] for group in after.optimizer.param_groups] == [0.95, 0.7]
    assert [group["rest"] for group in after.optimizer.param_groups] == ["sgd", "sgd"]
    kept = after.optimizer.state[after.model.bias]["momentum_buffer"]
    assert torch.equal(kept, before.optimizer.state[before.model.bias]["momentum_buffer"])


def test_a_user_defined_optimizer_resumes_with_the_settings_of_the_checkpoint(make_config: MakeConfig) -> None:
    def own(decay: float) -> Config:
        return make_config(optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay))

    after = stepper_of(own(0.3))
    restore(SimpleNamespace(), found(stepper_of(own(0.1))), after, [])
    assert after.optimizer.param_groups[0]["weight_decay"] == 0.1


class Counter(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_callbacks_get_their_state_back_by_the_names_of_their_classes(make_config: MakeConfig) -> None:
    context = SimpleNamespace(warn=(warned := []).append)
    stepper, saved, first = stepper_of(make_config()), found(stepper_of(make_config())), Counter()
    saved.state.values["counters"]["callbacks"] = {"Counter": {"steps": 7}, "Counter 2": {"steps": 9}, "Gone": {"x": 1}}
    restore(context, saved, stepper, [Callback(), first])
    assert first.steps == 7
    assert [text.partition(",")[0] for text in warned] == [
        "the checkpoint has the state of a callback Counter 2", "the checkpoint has the state of a callback Gone",
    ]  # fmt: skip


def test_the_state_in_a_checkpoint_is_a_copy_with_plain_numbers() -> None:
    counter = Counter()
    counter.steps = [np.float64(0.5), torch.ones(2)]  # type: ignore[assignment]
    states = states_of([counter, counter])
    counter.steps[1].zero_()  # type: ignore[index]
    assert states["Counter 2"]["steps"][1].tolist() == [1.0, 1.0]
    assert type(states["Counter"]["steps"][0]) is float
    states_of([counter])
    counter.steps = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be in a checkpoint"):
        states_of([counter])
    counter.steps = print  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"the state_dict\(\) of callback Counter cannot be in a checkpoint"):
        states_of([counter])


def test_checkpoints_of_earlier_versions_have_other_names() -> None:
    content = asdict(TrainState(step=3, is_evaluation_due=True, stream_position=(2, 1)))
    del content["frozen"]
    for name, earlier in EARLIER_NAMES.items():
        content[earlier] = content.pop(name)
    assert TrainState.from_dict(content) == TrainState(step=3, is_evaluation_due=True, stream_position=(2, 1))
