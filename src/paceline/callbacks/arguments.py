"""What the arguments of our callbacks must be, as a table of rules; a mistake is an error where the object is made."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

from paceline.errors import ConfigError


class Rule(NamedTuple):
    """What an argument must be."""

    holds: Callable[[Any], bool]
    words: str  # what is wrong, and what to do


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


COUNT = Rule(
    lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1,
    "is not a whole number from 1; give one, such as 5",
)
NOT_NEGATIVE = Rule(lambda value: _is_number(value) and value >= 0, "is not a number from 0; give one, such as 0.01")
SHARE = Rule(
    lambda value: _is_number(value) and 0 <= value <= 1, "is not a number between 0 and 1; give one, such as 0.999"
)
TEXT = Rule(lambda value: isinstance(value, str) and bool(value), 'is not a name; give a text, such as "val_loss"')
FUNCTION = Rule(callable, "is not a function; give a function")


def check(owner: str, rule: Rule, **arguments: Any) -> None:
    """Raise a ConfigError that names the first argument of a callback for which a rule does not hold."""
    for name, value in arguments.items():
        if not rule.holds(value):
            raise ConfigError(f"{owner}: {name}={value!r} {rule.words}")
