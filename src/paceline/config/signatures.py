"""Whether the user's functions take the arguments that they will be called with."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from paceline.callbacks import Callback
from paceline.config.functions import name_of
from paceline.config.phases import named_functions
from paceline.config.schema import Config

TRAIN_FN_ARGUMENTS = ("model", "train_loader", "val_loader", "device", "num_epochs")
# How the functions of a config are called, by their keys; those of `metrics` are in a dict, those of phases, too.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "collate_fn": ("samples",),
    "order_fn": ("epoch", "size"),
    "sample_weights": ("dataset",),
    "difficulty_fn": ("sample",),
    "loss_fn": ("output", "target"),
    "metrics": ("output", "target"),
    "step_fn": ("model", "batch"),
    "evaluate_fn": ("model", "batch"),
    "predict_fn": ("model", "batch"),
    "optimizer_fn": ("model",),
    "schedule_fn": ("step", "total_steps"),
}
CALLBACK_ARGUMENTS: dict[str, tuple[str, ...]] = {  # of the methods of a callback
    "on_start": ("run",),
    "on_step": ("run", "metrics"),
    "on_evaluate": ("run", "metrics"),
    "on_checkpoint": ("run", "path"),
    "on_stop": ("run", "reason"),
    "state_dict": (),
    "load_state_dict": ("state",),
}


def wrong_calls(config: Config) -> list[str]:
    """The problems of functions that do not take the arguments that they will be called with."""
    problems: list[str] = []
    for key, arguments in ARGUMENTS.items():
        for name, function in named_functions(getattr(config, key), key):
            if not hasattr(function, "compute"):  # such a metric is updated, not called
                problems += _wrong_call(name, function, arguments, is_called=key)
    named = ["total_steps"] if takes_total_steps(config.scheduler_fn) else []
    problems += _wrong_call("scheduler_fn", config.scheduler_fn, ("optimizer",), named)
    run = ["run"] if config.takes_run else []
    wrong = _wrong_call("train_fn", config.train_fn, TRAIN_FN_ARGUMENTS, run)
    return problems + [f"{problem}, or with a further parameter run" for problem in wrong]


def wrong_methods(key: str, callback: Callback) -> list[str]:
    """The problems of a callback's methods that do not take the arguments that they will be called with."""
    return [
        problem
        for method, arguments in CALLBACK_ARGUMENTS.items()
        if callback.overrides(method)
        for problem in _wrong_call(f"{key}.{method}", getattr(callback, method), arguments, is_called=method)
    ]


def takes_total_steps(scheduler_fn: Any) -> bool:
    """Whether a function has a parameter `total_steps` that has no value yet."""
    try:
        parameter = inspect.signature(scheduler_fn).parameters.get("total_steps")
    except (TypeError, ValueError):  # not a function, or a builtin without a signature
        return False
    return parameter is not None and parameter.default in (parameter.empty, None)


def _wrong_call(
    key: str, function: Any, arguments: tuple[str, ...], named: Sequence[str] = (), is_called: str | None = None
) -> list[str]:
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
        called = f"{is_called or key}({', '.join((*arguments, *named))})"
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
        if not callable(function) or (taken := arguments_of(function)) is None:
            continue
        for name in [name for name in getattr(config, key) if name not in taken]:
            near = difflib.get_close_matches(str(name), taken, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(taken) or 'none'}"
            problems.append(f"{key}.{name} is not an argument of {name_of(function)}; {hint}")
    return problems


def arguments_of(function: Callable[..., Any]) -> list[str] | None:
    """The names of arguments that a function takes; None if it takes any, or has no signature."""
    try:  # of a decorated function the outer signature counts, because the decorator is called
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]
