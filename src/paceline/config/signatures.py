"""Whether the user's functions take the arguments that they will be called with."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.callbacks import Callback
from paceline.config.answers import advice_on_value
from paceline.config.functions import name_of
from paceline.config.messages import is_optimizer
from paceline.config.phases import named_functions
from paceline.config.schema import Config
from paceline.config.written import OPEN, PYTHON, written
from paceline.user_code import with_place

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
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
TABLE_NAMES = ("df", "val_df", "table", "frame", "dataframe", "data_frame")  # of parameters that mean the table
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


def unsuitable_functions(config: Config) -> list[str]:
    """The problems of objects and classes where a function is expected."""
    return [*_model_instead_of_function(config), *_classes(config), *_unsuitable_collate_fn(config.collate_fn)]


def _model_instead_of_function(config: Config) -> Iterator[str]:
    model = config.model_fn
    if hasattr(model, "state_dict") and not isinstance(model, type):
        example = "model_fn=lambda: model" if config.origin.place == PYTHON else "def build(): return model"
        yield f"model_fn=<{type(model).__name__}> is a model; give a function that returns it, such as {example}"


def _classes(config: Config) -> Iterator[str]:
    loss, make = config.loss_fn, config.optimizer_fn
    if isinstance(loss, type):
        advice = advice_on_value("loss_fn", loss.__name__, {}, config.origin)
        other = advice.partition("; ")[2] if advice else "give the name of a function"
        words = f"give an object of it: loss_fn={loss.__name__}()" if config.origin.place == PYTHON else other
        yield f"loss_fn={name_of(loss)} is a class; {words}"
    if is_optimizer(make) and isinstance(make, type):
        words = f"lambda model: {make.__name__}(model.parameters())"
        yield f"optimizer_fn={name_of(make)} takes parameters, not the model; give a function such as {words}"


def _unsuitable_collate_fn(collate: Any) -> Iterator[str]:
    """A problem if `collate_fn` is a class, or has random numbers that would depend on the number of ranks."""
    if not callable(collate):
        return
    seed = getattr(collate, "seed", None)
    if isinstance(collate, type):
        yield f"collate_fn={name_of(collate)} is a class; give an object of it, or a function"
    elif seed is not None and hasattr(collate, "generator"):
        yield (
            f"collate_fn={name_of(collate)} has seed={seed} and so its own random generator, whose numbers "
            "depend on the number of ranks; leave its seed out: the key seed determines all random numbers"
        )


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


def missing_arguments(config: Config) -> list[str]:
    """The problems of `model_fn` and of functions of data sets that need further arguments, or take no table."""
    problems = []
    if missing := _missing(config.model_fn, config.model_args):
        words = written({"model_args": dict.fromkeys(missing, OPEN)}, config.origin.place)
        problems.append(f"{_called(config, 'model_fn')} needs {', '.join(missing)}; give {words}")
    problems += _wrong_tables(config, "dataset_fn", "df", config.dataset_args)
    if config.val_df is not None and config.val_dataset_fn is None and config.df is None:
        return problems  # a dataset_fn that lacks df has been reported
    return problems + _wrong_tables(config, "val_dataset_fn", "val_df", {})


def _wrong_tables(config: Config, key: str, table: str, named: Mapping[str, Any]) -> list[str]:
    """A problem if a function of a data set lacks arguments, or takes no table and gets one."""
    function, has_table = getattr(config, key), getattr(config, table) is not None
    if not callable(function) or (signature := _signature(function)) is None:
        return []
    if has_table and not any(each.kind in (*POSITIONAL, each.VAR_POSITIONAL) for each in signature.parameters.values()):
        return [f"{table} is given, but {_called(config, key)} takes {signature}; give it a parameter for the table"]
    missing = _missing(function, named, positional=int(has_table))
    if not missing:
        return []
    listed, others = ", ".join(missing), missing
    advice = []
    if not has_table and signature.parameters[missing[0]].kind in POSITIONAL:
        advice.append(f"{table}, a DataFrame or the path of a .csv or .parquet file")
        others = missing[1:] if missing[0] in TABLE_NAMES else missing
    if others and key == "dataset_fn":
        advice.append(written({"dataset_args": {**dict.fromkeys(others, OPEN)}}, config.origin.place))
    joined = " and " if others is not missing else " or "
    return [f"{_called(config, key)} needs {listed}; give {joined.join(advice)}"]


def _missing(function: Any, named: Mapping[str, Any], positional: int = 0) -> list[str]:
    """The names of arguments that a function cannot be called without, besides `positional` first ones."""
    signature = _signature(function) if callable(function) else None
    if signature is None:
        return []
    parameters = list(signature.parameters.values())
    by_place = [each for each in parameters if each.kind in POSITIONAL][:positional]
    needed = [p for p in parameters if p.default is p.empty and p.kind in (*POSITIONAL, p.KEYWORD_ONLY)]
    return [each.name for each in needed if each not in by_place and each.name not in named]


def _signature(function: Any) -> inspect.Signature | None:
    """The signature of a function; None if it has none. Of a decorated function, the decorator's, which is called."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def _called(config: Config, key: str) -> str:
    """A function as named in messages, with its place."""
    function = getattr(config, key)
    return f"{key}={with_place(name_of(function), function)}"


def arguments_of(function: Callable[..., Any]) -> list[str] | None:
    """The names of arguments that a function takes; None if it takes any, or has no signature."""
    if (signature := _signature(function)) is None:
        return None
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]
