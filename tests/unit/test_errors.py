"""Ranks send errors to each other, so pickling must preserve them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from paceline import errors
from paceline.errors import PacelineError

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ConfigError": (["lanes=6 is odd", "seed=x is not a number"],),
    "PicklingError": ("a lambda",),
    "MissingExtra": ("ray", "ray", "launcher=ray"),
    "UnusedParameters": (["head.weight", "head.bias"],),
    "ReplicasDiffer": ("bias", [1, 3], 8),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_with_its_text_and_attributes(kind: type[PacelineError]) -> None:
    error = kind(*ARGUMENTS.get(kind.__name__, ("step 7 failed",)))
    error.exit_code = 7
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    assert copy.exit_code == 7
