"""Targets are checked before a loss is computed, with the errors of a CPU; `functional` stands for any device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.engine.loss_checks import LossChecks

TARGETS = torch.tensor([0, 2, -100, 1])


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that accept any target, as a GPU does until it is too late."""
    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", lambda output, *rest: output.sum())
    monkeypatch.setattr(torch._C._nn, "nll_loss_nd", lambda output, *rest: output.sum())


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.CrossEntropyLoss(), functional.nll_loss, nn.NLLLoss()])
@pytest.mark.parametrize(("target", "wrong"), [(TARGETS, 2), (-TARGETS.clamp(min=0), -2)])
def test_a_class_that_the_output_does_not_have_is_refused(loss: object, target: torch.Tensor, wrong: int) -> None:
    with LossChecks(), pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        loss(torch.zeros(4, 2), target)  # type: ignore[operator]


@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.CrossEntropyLoss()])
def test_good_targets_are_accepted(loss: object) -> None:
    with LossChecks():
        assert loss(torch.zeros(4, 3), TARGETS).isfinite()  # type: ignore[operator]
        assert loss(torch.zeros(4, 3), torch.full((4, 3), 1 / 3)).isfinite()  # type: ignore[operator]


def test_another_class_can_be_ignored() -> None:
    with LossChecks():
        assert functional.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 9]), ignore_index=9).isfinite()
        assert nn.CrossEntropyLoss(ignore_index=9)(torch.zeros(2, 3), torch.tensor([1, 9])).isfinite()


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.l1_loss, nn.HuberLoss()])
def test_an_output_with_a_further_dimension_is_refused(loss: object) -> None:
    with LossChecks():
        with pytest.raises(ValueError, match="must be the same as input size"):
            loss(torch.zeros(4, 1), torch.zeros(4))  # type: ignore[operator]
        assert loss(torch.zeros(4, 1), torch.zeros(4, 1)) == 0  # type: ignore[operator]
        assert loss(torch.zeros(1, 1), torch.zeros(1)) == 0  # type: ignore[operator]
