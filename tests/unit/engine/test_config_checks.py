from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.trainer import build_config
from support.configs import MANAGED, problems


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (
            {"name": "adamww"},
            "optimizer.name='adamww' is not an optimizer of torch.optim; did you mean adamw?",
        ),
        (
            {"name": "adamw", "weight_dacay": 0.1},
            "optimizer.weight_dacay is not an argument of AdamW; did you mean optimizer.weight_decay?",
        ),
        ({"lr": 0}, "optimizer.lr=0 must be greater than 0"),
    ],
)
def test_typos_in_the_optimizer_are_mistakes(optimizer: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "optimizer": optimizer}) == [problem]


@pytest.mark.parametrize("loss_fn", ["binary_cross_entropy", torch.nn.BCELoss()])
def test_accuracy_conflicts_with_a_loss_of_probabilities(loss_fn: Any) -> None:
    [problem] = problems({**MANAGED, "loss_fn": loss_fn, "metrics": ["accuracy"]})
    assert problem.endswith("use binary_cross_entropy_with_logits, and no sigmoid in the model")
    build_config({**MANAGED, "loss_fn": loss_fn, "metrics": ["mse"]})


def test_a_loss_with_trainable_weights_is_refused_unless_they_are_frozen() -> None:
    critic = torch.nn.PReLU()
    [problem] = problems({**MANAGED, "loss_fn": critic})
    assert problem.startswith(
        "loss_fn has trainable weights, which the optimizer would not update; make them a part of the model"
    )
    build_config({**MANAGED, "loss_fn": critic.requires_grad_(False)})
    build_config({**MANAGED, "loss_fn": torch.nn.CrossEntropyLoss(weight=torch.ones(2))})


def test_an_unknown_metric_lists_the_known_ones() -> None:
    assert problems({**MANAGED, "metrics": ["accuracy", "f1"]}) == [
        "metrics='f1' is not known; use accuracy, mse, mae, or {f1: function}"
    ]


def test_a_value_that_an_optimizer_fails_on_is_reported_in_one_sentence() -> None:
    assert problems({**MANAGED, "optimizer": {"name": "adamw", "betas": {"a": 1}}}) == [
        "optimizer={name: adamw, …} cannot be created with these values of betas (KeyError: 0); "
        "see torch.optim.AdamW for valid values"
    ]
