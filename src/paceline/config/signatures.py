"""Whether the user's functions take the arguments that they will be called with."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from paceline.config.functions import name_of
from paceline.config.phases import map_functions
from paceline.config.schema import Config

TRAIN_FN_ARGUMENTS = ("model", "train_loader", "val_loader", "device", "num_epochs")
SCHEDULE_FN_ARGUMENTS = ("step", "total_steps")
STEP_ARGUMENTS = ("model", "batch")  # of step_fn, evaluate_fn and predict_fn


def wrong_train_fn(config: Config) -> list[str]:
    """A problem if `train_fn` cannot be called with its five arguments."""
    run = ["run"] if config.takes_run else []
    problems = _wrong_call("train_fn", config.train_fn, TRAIN_FN_ARGUMENTS, run)
    return [f"{problem}, or with a further parameter run" for problem in problems]


def wrong_schedule_fn(config: Config) -> list[str]:
    """A problem if `schedule_fn` cannot be called with a step and the number of steps."""
    return _wrong_call("schedule_fn", config.schedule_fn, SCHEDULE_FN_ARGUMENTS)


def wrong_step_functions(config: Config) -> list[str]:
    """The problems of `step_fn`, `evaluate_fn` and `predict_fn` that cannot be called with a model and a batch."""
    problems: list[str] = []
    for key in ("step_fn", "evaluate_fn", "predict_fn"):
        if (value := getattr(config, key)) is not None:
            map_functions(value, lambda name, given: problems.extend(_wrong_call(name, given, STEP_ARGUMENTS)), key)
    return problems


def _wrong_call(key: str, function: Any, arguments: tuple[str, ...], named: Sequence[str] = ()) -> list[str]:
    """A problem if a function cannot be called with these arguments, by their positions, and `named` by name."""
    if not callable(function):
        return []
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return []
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError:
        called = f"{key.partition('.')[0]}({', '.join(arguments)})"
        return [f"{key}={name_of(function)} takes {signature}; it is called as {called}"]
    return []


def unsuitable_collate_fn(config: Config) -> list[str]:
    """A problem if `collate_fn` is a class, or has random numbers that would depend on the number of ranks."""
    collate = config.collate_fn
    if not callable(collate):
        return []
    if isinstance(collate, type):
        return [f"collate_fn={name_of(collate)} is a class; give an object of it, or a function"]
    seed = getattr(collate, "seed", None)
    if seed is not None and hasattr(collate, "generator"):
        return [
            f"collate_fn={name_of(collate)} has seed={seed} and so its own random generator, whose numbers "
            "depend on the number of ranks; leave its seed out: the key seed determines all random numbers"
        ]
    return []


def unknown_arguments(config: Config) -> list[str]:
    """Names in `model_args` and `dataset_args` that the function certainly does not take."""
    problems = []
    for key, function in (("model_args", config.model_fn), ("dataset_args", config.dataset_fn)):
        if not callable(function) or (taken := _arguments_of(function)) is None:
            continue
        for name in [name for name in getattr(config, key) if name not in taken]:
            near = difflib.get_close_matches(str(name), taken, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(taken) or 'none'}"
            problems.append(f"{key}.{name} is not an argument of {name_of(function)}; {hint}")
    return problems


def _arguments_of(function: Callable[..., Any]) -> list[str] | None:
    """The names of arguments that a function takes; None if it takes any, or has no signature."""
    try:  # of a decorated function the outer signature counts, because the decorator is called
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]
