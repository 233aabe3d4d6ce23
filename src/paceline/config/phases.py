"""Phases of a step: `step_fn` as a dict of functions, each with an optimizer of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.errors import ConfigError

Function = Callable[..., Any] | str


class Every:
    """The function of a phase that runs only at every `n`-th step; created by `every`."""

    def __init__(self, n: int, function: Function) -> None:
        if not _is_count(n):
            raise ConfigError(f"every({n!r}, …) needs a positive number of steps; use every(5, function)")
        if not _is_function(function):
            raise ConfigError(
                f"every({n}, {function!r}) needs a function of the model and a batch; use every(5, function)"
            )
        self.n, self.function = n, function

    def __call__(self, model: Any, batch: Any) -> Any:
        """Call the function and return its value."""
        assert callable(self.function)
        return self.function(model, batch)

    def is_due(self, step: int) -> bool:
        """Whether the phase runs at a step, counted from 0: the first time at the `n`-th."""
        return (step + 1) % self.n == 0

    def to_plain(self) -> dict[str, Any]:
        """The form of a config file."""
        return {"every": self.n, "fn": self.function}


def every(n: int, function: Function) -> Every:
    """A phase of `step_fn` that runs only at every `n`-th step: `{"generator": every(5, generator_step)}`."""
    return Every(n, function)


def with_every(value: Any) -> Any:
    """The value of `step_fn`, with `{every: n, fn: function}` of a config file replaced by `every(n, function)`.

    Raises a ValueError that describes the first invalid phase.
    """
    if not isinstance(value, Mapping):
        return value
    return {name: _phase(name, phase) for name, phase in value.items()}


def _phase(name: Any, phase: Any) -> Any:
    if not isinstance(name, str):
        raise ValueError(f"has a phase named {name!r}, which is not a string; name the phase as in optimizer_fn")
    if isinstance(phase, Mapping) and phase.keys() == {"every", "fn"}:
        if not _is_count(phase["every"]):
            raise ValueError(f"has the phase {name} at every={phase['every']!r}; use a positive number of steps")
        return Every(phase["every"], phase["fn"])
    if not isinstance(phase, Every) and not _is_function(phase):
        raise ValueError(f"has the phase {name}={phase!r}; use a function, or {{every: 5, fn: function}}")
    return phase


def _is_function(value: Any) -> bool:
    """Whether a value is a function or the name of one; an `Every` already has its interval."""
    return (callable(value) or isinstance(value, str)) and not isinstance(value, Every)


def _is_count(n: Any) -> bool:
    return type(n) is int and n >= 1


def map_functions(value: Any, change: Callable[[str, Any], Any], key: str = "step_fn") -> Any:
    """The value of a key with `change(key, function)` in place of its function, or of the function of each phase."""
    if isinstance(value, Mapping):
        return {name: map_functions(inner, change, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, Every):
        return Every(value.n, change(key, value.function))
    return change(key, value)


def named_functions(value: Any, key: str = "step_fn") -> Iterator[tuple[str, Any]]:
    """The functions in the value of a key, with their keys: none, one, or one for each phase."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from named_functions(inner, f"{key}.{name}")
    elif value is not None:
        yield key, value.function if isinstance(value, Every) else value


def functions_in(value: Any) -> list[Any]:
    """The functions in the value of a key: none, one, or one for each phase."""
    return [function for _, function in named_functions(value)]
