"""Rules for the arguments of our callbacks; a mistake raises an error where the object is created."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

from paceline.errors import ConfigError


class Rule(NamedTuple):
    """A condition that an argument must meet."""

    holds: Callable[[Any], bool]
    words: str  # the problem and the fix


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


COUNT = Rule(
    lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1,
    "is not a positive integer; use one, such as 5",
)
NOT_NEGATIVE = Rule(
    lambda value: _is_number(value) and value >= 0, "is not a number of at least 0; use one, such as 0.01"
)
SHARE = Rule(
    lambda value: _is_number(value) and 0 <= value <= 1, "is not a number between 0 and 1; use one, such as 0.999"
)
TEXT = Rule(lambda value: isinstance(value, str) and bool(value), 'is not a name; use a string, such as "val_loss"')
FUNCTION = Rule(callable, "is not a function; pass a function")


def check(owner: str, rule: Rule, **arguments: Any) -> None:
    """Raise a ConfigError that names the first argument of a callback for which a rule does not hold."""
    for name, value in arguments.items():
        if not rule.holds(value):
            raise ConfigError(f"{owner}: {name}={value!r} {rule.words}")
