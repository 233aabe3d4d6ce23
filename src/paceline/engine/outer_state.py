"""Modules outside the model that a step uses, such as a loss with buffers: found in the functions that use them.

Tensors in them that a step may change are treated like those of the model: separate for each lane, and saved.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.config import Settings
from paceline.config.phases import functions_in, map_functions
from paceline.errors import ConfigError


def outer_state(settings: Settings) -> torch.nn.Module | None:
    """The modules outside the model that `loss_fn` or `step_fn` uses, as one module; None if there are none."""
    if isinstance(settings.loss_fn, torch.nn.Module):
        return settings.loss_fn
    functions = functions_in(settings.step_fn)
    if len(functions) == 1 and isinstance(functions[0], torch.nn.Module):
        return functions[0]
    holder = torch.nn.Module()
    for function in functions:
        for name, module in modules_of(function):
            if all(module is not known for known in holder.children()):
                holder.add_module(name if name not in holder._modules else f"{name}_{len(holder._modules)}", module)
    return holder if holder._modules else None


def modules_of(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a function refers to, with their names in it; also through functions of the same file."""
    seen = {id(function)} if seen is None else seen
    for name, value in _references(function):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield name, value
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _in_container(name, value, seen)
        elif _is_of_same_file(value, function):
            yield from modules_of(value, seen)


def _in_container(
    name: str, container: Mapping[Any, Any] | Sequence[Any], seen: set[int]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules in a list or dict, with their positions: `teachers[0]`, `heads[first]`."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in items:
        place = f"{name}[{key}]".replace(".", "_")  # torch does not allow a dot in the name of a module
        if isinstance(value, torch.nn.Module) and id(value) not in seen:
            seen.add(id(value))
            yield place, value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            yield from _in_container(place, value, seen)


def _references(function: Any) -> Iterator[tuple[str, Any]]:
    """The names and objects that a function refers to directly."""
    if isinstance(function, functools.partial):
        yield from ((f"argument_{index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _references(function.func)
    elif isinstance(function, types.FunctionType):
        yield from _of_code(function)
    else:  # a method, or a callable object
        holder = getattr(function, "__self__", function)
        yield "step_fn", holder
        yield from getattr(holder, "__dict__", {}).items()
        yield from _of_code(getattr(function, "__func__", type(holder).__call__))


def _is_of_same_file(value: Any, function: Any) -> bool:
    own = getattr(function, "__globals__", None)
    return isinstance(value, types.FunctionType) and value.__globals__ is own


def _of_code(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals, closure and defaults of a plain function."""
    if not isinstance(function, types.FunctionType):
        return
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from ((name, value) for value in _contents(cell))
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"default_{index}", value) for index, value in enumerate(defaults))


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def place_loss(loss: Any, device: torch.device) -> Any:
    """A copy on the device of a loss that is a module, so that another run of this process starts from the original."""
    return copy.deepcopy(loss).to(device) if isinstance(loss, torch.nn.Module) else loss


def place_steps(value: Any, device: torch.device) -> Any:
    """The value of `step_fn` with the modules that its functions refer to on the device."""

    def placed(_: str, function: Any) -> Any:
        if not isinstance(function, torch.nn.Module):
            for _, module in modules_of(function):
                module.to(device)
        return place_loss(function, device)

    return None if value is None else map_functions(value, placed)


def check_outer_weights(settings: Settings) -> None:
    """Reject modules outside the model that have trainable weights: no optimizer would update them."""
    if settings.step_fn is None or (outer := outer_state(settings)) is None:
        return
    for name, parameter in outer.named_parameters():
        if parameter.requires_grad:
            raise ConfigError(
                f"step_fn uses {name.partition('.')[0]}, which is outside the model and has trainable weights; make it "
                "a part of the model, or freeze it with requires_grad_(False)"
            )
