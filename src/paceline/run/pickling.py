"""Finds the part of a function or value that cannot be pickled, for an error message that names the path to it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import cloudpickle

from paceline.errors import PicklingError


def pickling_error(name: str, value: Any) -> PicklingError:
    """The error for a value that cannot be pickled; it names a path: `fn → closure 'cfg' → attribute 'lock'`."""
    path, part, reason = _deepest(name, value, seen=set())
    return PicklingError(
        f"{path} cannot be pickled for the ranks: it is a {type(part).__name__} ({reason}); "
        "create it inside the function instead"
    )


def pickle_failure(value: Any) -> str | None:
    """The reason why a value cannot be pickled; None if it can."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        return str(error) or type(error).__name__
    return None


def _deepest(path: str, value: Any, seen: set[int]) -> tuple[str, Any, str]:
    """The innermost part that cannot be pickled: the path to it, the part itself, and the reason."""
    seen.add(id(value))
    for step, part in _parts(value):
        if id(part) not in seen and pickle_failure(part) is not None:
            return _deepest(f"{path} → {step}", part, seen)
    return path, value, pickle_failure(value) or "it refers to itself"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that are pickled together with `value`, each with its name inside `value`."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that is not assigned yet
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
    """The global names that a function uses, including its lambdas and comprehensions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
