"""Why something cannot travel to the ranks: the path to the part of it that does not pickle."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import cloudpickle

from paceline.errors import TravelError


def explain(name: str, value: Any) -> TravelError:
    """The error for a value that does not pickle, such as `model_fn → closure 'cfg' → attribute 'lock'`."""
    path, culprit, reason = _deepest(name, value, seen=set())
    return TravelError(
        f"{path} cannot travel to the ranks: it is a {type(culprit).__name__} ({reason}); "
        "create it inside the function instead"
    )


def obstacle(value: Any) -> str | None:
    """The pickling error of a value, or None if it travels."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        return str(error) or type(error).__name__
    return None


def _deepest(path: str, value: Any, seen: set[int]) -> tuple[str, Any, str]:
    seen.add(id(value))
    for step, part in _parts(value):
        if id(part) not in seen and obstacle(part) is not None:
            return _deepest(f"{path} → {step}", part, seen)
    return path, value, obstacle(value) or "it refers to itself"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickling `value` would pickle too, with a word for the way there."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name without a value yet
                yield f"closure {name!r}", cell.cell_contents
        for name in _names_in(value.__code__):
            if name in value.__globals__:
                yield f"global {name!r}", value.__globals__[name]
        yield from ((f"default {n}", default) for n, default in enumerate(value.__defaults__ or ()))
        yield from ((f"default {name!r}", default) for name, default in (value.__kwdefaults__ or {}).items())
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, functools.partial):
        yield "its function", value.func
        yield "its arguments", (*value.args, value.keywords)
    elif isinstance(value, dict):
        yield from ((f"key {key!r}", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {n}", inner) for n, inner in enumerate(value))
    elif not isinstance(value, types.ModuleType):
        yield from ((f"attribute {name!r}", inner) for name, inner in getattr(value, "__dict__", {}).items())


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses, those of its lambdas and comprehensions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
