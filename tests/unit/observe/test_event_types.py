"""The names that values of the user cannot have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.engine.objective import parts_of
from paceline.errors import ConfigError
from paceline.observe.event_types import RESERVED_NAMES
from paceline.trainer import build_config
from paceline.worker.logged_values import checked
from paceline.worker.measures import evaluated
from support.configs import MANAGED


def test_the_reserved_names_are_the_fields_of_events_with_values() -> None:
    assert sorted(RESERVED_NAMES) == [
        "epoch", "epochs", "event", "grad_norm", "lr", "memory_mb", "phase_ms", "samples_per_s", "self", "step",
        "step_ms", "steps", "time", "train_loss", "values",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
@pytest.mark.parametrize(
    "log",
    [
        lambda name: parts_of({"loss": 1.0, name: 2.0}, "step_fn"),
        lambda name: evaluated({name: 1.0}),
        lambda name: checked(name, 1.0),
        lambda name: build_config({**MANAGED, "metrics": {name: lambda output, target: 0.0}}),
    ],
    ids=["step_fn", "evaluate_fn", "run.log", "metrics"],
)
def test_no_value_can_have_a_reserved_name(log: Callable[[str], object], name: str) -> None:
    with pytest.raises(ConfigError, match="choose another name"):
        log(name)


def test_a_loss_can_be_logged_under_its_name() -> None:
    assert parts_of({"loss": 1.0}, "step_fn") == (1.0, {})
    assert evaluated({"loss": 1.0}) == evaluated({"val_loss": 1.0}) == {"val_loss": 1.0}
    assert checked("loss", 1.0) == checked("val_loss", 1.0) == 1.0
