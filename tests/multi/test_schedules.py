"""Learning rates whose next value depends on the last ones: a resumed run has those of an uninterrupted one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness_cases import one_cycle
from faults import events, outcome, start
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, ReduceLROnPlateau, SequentialLR

from paceline.errors import ConfigError


def in_sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts: list[Any] = [MultiStepLR(optimizer, [2, 3], 0.5), MultiStepLR(optimizer, [4], 0.1)]
    return SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": {"name": "plateau", "patience": 1, "factor": 0.5, "min_delta": 1.0}},
        {"scheduler_fn": one_cycle, "optimizer": {"name": "adamw", "lr": 0.01}},
        {"scheduler_fn": in_sequence},
        {"scheduler_fn": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)},
    ],
    ids=["plateau", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"],
)
def test_a_resized_run_has_the_rates_of_an_undisturbed_one(keys: dict[str, Any]) -> None:
    keys = {"schedule": "constant", "num_epochs": 4, **keys}
    whole = start(**keys, procs=1, checkpoint={"every_steps": 5, "keep": 100, "async": False})
    assert len({event["lr"] for event in events("step")}) > 2  # else this test has gone blind
    for step, procs in ((10, 2), (25, 4)):
        folder = f"from-{step}"
        resumed = start(**keys, resume=f"run/checkpoints/step-{step:08d}", run_dir=folder, procs=procs)
        assert [(event["step"], event["lr"]) for event in events("step", folder)] == [
            (event["step"], event["lr"]) for event in events("step") if event["step"] > step
        ]
        assert resumed.weights_sha256 == whole.weights_sha256
        assert resumed.optimizer_sha256 == whole.optimizer_sha256
        assert outcome(resumed)["history"] == outcome(whole)["history"]


class Unsavable(LRScheduler):
    """Keeps a function, which its state has, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = lambda step: 0.9**step
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]


def test_a_scheduler_that_no_checkpoint_can_hold_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the scheduler of scheduler_fn cannot be in"):
        start(schedule="constant", scheduler_fn=Unsavable)
    assert events("step") == []


def test_a_factor_that_is_not_a_number_names_the_step() -> None:
    with pytest.raises(ConfigError, match=r"schedule_fn returned nan for step 3 of \d+"):
        start(schedule="constant", schedule_fn=lambda step, total_steps: 1.0 if step < 3 else float("nan"))
