"""From what was given to a config: checked, with its functions and tables found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.callbacks import Callback
from paceline.config.checks import conflicts, describe, unknown_arguments, unknown_names, wrong_losses
from paceline.config.functions import FunctionNotFound, home_of, name_of, resolve
from paceline.config.schema import FUNCTION_KEYS, NAMED_SECTIONS, TABLE_KEYS, Config
from paceline.config.yaml import parse
from paceline.errors import ConfigError
from paceline.system.paths import is_file, problem_with

TRAIN_FN_ARGUMENTS = ("model", "train_loader", "val_loader", "device", "num_epochs")


def build(raw: Mapping[str, Any], *, folder: Path | None = None) -> Config:
    """A checked config with callable functions, or one ConfigError that lists every mistake.

    Names of functions and relative paths of data are looked up in the config's `folder`, which is relative to this one.
    """
    # A known key without a value keeps its default; an unknown one is a mistake all the same.
    values = {str(k): value for k, value in raw.items() if value is not None or k not in Config.model_fields}
    problems: list[str] = []
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += list(dict.fromkeys(describe(detail) for detail in details))
        # What is right is checked further, so that nobody mends one mistake only to be shown the next.
        wrong = {str(detail["loc"][0]) for detail in details}
        config = Config.model_validate({key: value for key, value in values.items() if key not in wrong})
        problems += conflicts(config, given=set(values), wrong=wrong)
    else:
        problems += conflicts(config, given=set(values))
    if config.folder is not None:
        folder = (folder or Path()) / config.folder
    problems += _resolve_functions(config, folder)
    problems += make_callbacks(config)
    problems += unknown_names(config) + wrong_losses(config)
    problems += unknown_arguments(config)
    problems += resolve_tables(config, folder)
    if problems:
        raise ConfigError(problems)
    config.folder = folder.resolve() if folder is not None else _home(config)
    return config


def override(raw: dict[str, Any], assignments: Iterable[str]) -> None:
    """Apply `key=value` and `key.inner=value` from the command line; values are read as YAML.

    A table is looked for in the working folder first, where people see it when they type, then in the config's.
    """
    problems = []
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        *sections, last = dotted.split(".")
        if not separator or not all([*sections, last]):
            problems.append(f"{assignment!r} is not key=value; write for instance batch_size=128 or optimizer.lr=3e-4")
            continue
        target = raw
        for section in sections:
            inner = target.get(section)
            if target is raw and section in NAMED_SECTIONS and isinstance(inner, str):
                inner = {"name": inner}
            target[section] = target = dict(inner) if isinstance(inner, dict) else {}
        target[last] = parse(text)
        if dotted in TABLE_KEYS and Path(text).is_file():
            target[last] = str(Path(text).resolve())
    if problems:
        raise ConfigError(problems)


def resolve_tables(config: Config, folder: Path | None) -> list[str]:
    """Make the paths of tables absolute; what is wrong with them, one sentence each."""
    problems = []
    for key in TABLE_KEYS:
        table = getattr(config, key)
        if table is None or hasattr(table, "columns"):
            continue
        if not isinstance(table, (str, Path)):
            problems.append(f"{key} is a {type(table).__name__}; give a DataFrame or the path of a CSV or Parquet file")
            continue
        if problem := problem_with(table):
            problems.append(f"{key}={str(table)!r} {problem}")
            continue
        path = (folder or Path()) / table
        if path.suffix.lower() not in (".csv", ".parquet", ".gz"):
            problems.append(f"{key}={str(table)!r} must end in .csv, .csv.gz or .parquet")
        elif not is_file(path):
            problems.append(f"{key}={str(table)!r} does not exist; looked for {path.resolve()}")
        setattr(config, key, path.resolve())
    return problems


def _resolve_functions(config: Config, folder: Path | None) -> list[str]:
    problems = []

    def resolved(key: str, name: str) -> Callable[..., Any] | str:
        # A bare name is a loss of torch.nn.functional: `loss_fn: cross_entropy`.
        full = f"torch.nn.functional:{name}" if key == "loss_fn" and ":" not in name else name
        try:
            return resolve(full, folder)
        except FunctionNotFound as reason:
            problems.append(f"{key}={name!r} {reason}")
            return name

    for key in FUNCTION_KEYS:
        value = getattr(config, key)
        if isinstance(value, str):
            setattr(config, key, resolved(key, value))
    if isinstance(config.metrics, dict):
        config.metrics = {
            name: resolved(f"metrics.{name}", metric) if isinstance(metric, str) else metric
            for name, metric in config.metrics.items()
        }
    config.callbacks = [
        resolved(f"callbacks.{place}", value) if isinstance(value, str) else value
        for place, value in enumerate(config.callbacks)
    ]
    if callable(config.train_fn):
        try:
            inspect.signature(config.train_fn).bind(*TRAIN_FN_ARGUMENTS)
        except TypeError:
            problems.append(
                f"train_fn={name_of(config.train_fn)} takes {inspect.signature(config.train_fn)}; "
                f"it is called as train_fn({', '.join(TRAIN_FN_ARGUMENTS)})"
            )
        except ValueError:
            pass  # a builtin without a signature
    return problems


def make_callbacks(config: Config) -> list[str]:
    """Make callbacks of the classes and functions in `callbacks`; what is wrong with them, one sentence each."""
    problems = []
    for place, value in enumerate(config.callbacks):
        made = value() if callable(value) and not isinstance(value, Callback) else value
        if not isinstance(made, Callback | str):  # a name that was not found is reported already
            problems.append(
                f"callbacks.{place}=<{type(made).__name__}> is not a callback; derive its class from paceline.Callback"
            )
        config.callbacks[place] = made
    return problems


def _home(config: Config) -> Path | None:
    """The folder of the first function that is not of an installed package: there, a command finds them again."""
    functions = (getattr(config, key) for key in FUNCTION_KEYS)
    return next((home for function in functions if function is not None and (home := home_of(function))), None)
