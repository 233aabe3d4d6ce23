"""Phases of a step: `step_fn` as a dict of functions, each with an optimizer of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import ConfigError

Function = Callable[..., Any] | str


class Every:
    """The function of a phase that runs only at each `n`-th step; made by `every`."""

    def __init__(self, n: int, function: Function) -> None:
        if not _is_count(n):
            raise ConfigError(f"every({n!r}, …) needs a number of steps from 1; use every(5, function)")
        self.n, self.function = n, function

    def __call__(self, model: Any, batch: Any) -> Any:
        """What the function returns."""
        assert callable(self.function)
        return self.function(model, batch)

    def is_due(self, step: int) -> bool:
        """Whether the phase runs at a step, counted from 0: the first time at the `n`-th."""
        return (step + 1) % self.n == 0

    def to_plain(self) -> dict[str, Any]:
        """The form of a config file."""
        return {"every": self.n, "fn": self.function}


def every(n: int, function: Function) -> Every:
    """A phase of `step_fn` that runs only at each `n`-th step: `{"generator": every(5, generator_step)}`."""
    return Every(n, function)


def with_every(value: Any) -> Any:
    """The value of `step_fn`, in which `{every: n, fn: function}` of a config file has become `every(n, function)`."""
    if not isinstance(value, Mapping):
        return value
    return {name: Every(phase["every"], phase["fn"]) if _is_every(phase) else phase for name, phase in value.items()}


def _is_every(phase: Any) -> bool:
    return isinstance(phase, Mapping) and phase.keys() == {"every", "fn"} and _is_count(phase["every"])


def _is_count(n: Any) -> bool:
    return type(n) is int and n >= 1


def map_functions(value: Any, change: Callable[[str, Any], Any], key: str = "step_fn") -> Any:
    """The value of a key with `change(key, function)` in place of each function: of one, or of each phase."""
    if isinstance(value, Mapping):
        return {name: map_functions(inner, change, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, Every):
        return Every(value.n, change(key, value.function))
    return change(key, value)


def functions_in(value: Any) -> list[Any]:
    """The functions in the value of a key: none, one, or one for each phase."""
    found: list[Any] = []
    if value is not None:
        map_functions(value, lambda _, function: found.append(function))
    return found
