"""Builds a config from the user's values: validates them, imports the functions and finds the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline import callbacks
from paceline.callbacks import Callback
from paceline.config.answers import advice_on_value
from paceline.config.checks import Check, conflicts, train_fn_problems
from paceline.config.functions import FunctionNotFound, full_name, home_of, is_model_loss, is_object, resolve
from paceline.config.keys import FUNCTION_KEYS, NAMED_SECTIONS, TABLE_KEYS
from paceline.config.messages import problems_of
from paceline.config.phases import functions_in, map_functions
from paceline.config.schema import Config
from paceline.config.signatures import (
    missing_arguments,
    unknown_arguments,
    unsuitable_functions,
    wrong_calls,
    wrong_methods,
)
from paceline.config.written import FILE, PYTHON, Origin
from paceline.config.yaml import parse
from paceline.errors import ConfigError
from paceline.system.paths import is_file, problem_with


def build(
    raw: Mapping[str, Any], *, folder: Path | None = None, overridden: Sequence[str] = (), checks: Iterable[Check] = ()
) -> Config:
    """A valid config with callable functions, or one ConfigError that lists every mistake.

    Functions by name and relative paths of tables are looked up in `folder`, or in the config's own `folder`, which is
    relative to it. `overridden` are the keys of the command line. `checks` find further problems once the functions are
    imported.
    """
    # A known key without a value keeps its default; an unknown key without a value is an error.
    values = {str(k): value for k, value in raw.items() if value is not None or k not in Config.model_fields}
    config, problems = _validated(values, Origin(PYTHON if folder is None else FILE, tuple(overridden)))
    if config.folder is not None:
        folder = (folder or Path()) / config.folder
    problems += _resolve_functions(config, folder)
    problems += wrong_calls(config)
    problems += train_fn_problems(config)
    problems += unsuitable_functions(config)
    problems += unusable_callbacks(config)
    for check in checks:
        problems += check(config)
    problems += unknown_arguments(config)
    problems += missing_arguments(config)
    problems += resolve_tables(config, folder)
    if problems:
        raise ConfigError(problems)
    if config.global_batch_size is not None:
        config.lanes = config.global_batch_size // config.batch_size
    config.folder = folder.resolve() if folder is not None else _home(config)
    return config


def _validated(values: dict[str, Any], origin: Origin) -> tuple[Config, list[str]]:
    """The config and its problems; keys with an invalid value have their default, so that the others are checked."""
    invalid, problems = set[str](), list[str]()
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        invalid = {str(detail["loc"][0]) for detail in error.errors(include_url=False)}
        config = Config.model_validate({key: value for key, value in values.items() if key not in invalid})
        problems = problems_of(error, values, origin)
    config._origin = origin
    return config, problems + conflicts(config, invalid)


def override(raw: dict[str, Any], assignments: Iterable[str]) -> list[str]:
    """Apply `key=value` and `key.inner=value` from the command line, and return the keys; values are parsed as YAML.

    A name alone, as in `optimizer=sgd`, keeps the other options of the section.
    A table that exists in the working folder has precedence over a table in the config's folder.
    """
    problems, keys = [], []
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        *sections, last = dotted.split(".")
        if not separator or not all([*sections, last]):
            problems.append(f"{assignment!r} is not key=value; write, for example, batch_size=128 or optimizer.lr=3e-4")
            continue
        target = raw
        for section in sections:
            inner = target.get(section)
            if target is raw and section in NAMED_SECTIONS and isinstance(inner, str):
                inner = {"name": inner}
            target[section] = target = dict(inner) if isinstance(inner, dict) else {}
        keys.append(dotted)
        value, before = parse(text), target.get(last)
        is_name = dotted in NAMED_SECTIONS and isinstance(value, str)
        target[last] = {**before, "name": value} if is_name and isinstance(before, dict) else value
        if dotted in TABLE_KEYS and Path(text).is_file():
            target[last] = str(Path(text).resolve())
    if problems:
        raise ConfigError(problems)
    return keys


def resolve_tables(config: Config, folder: Path | None) -> list[str]:
    """Make the paths of tables absolute; returns one sentence for each table that cannot be read."""
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
    """Replace names of functions by the functions; returns one sentence for each that cannot be imported."""
    problems = []

    def resolved(key: str, name: Any) -> Any:
        if not isinstance(name, str) or is_model_loss(key, name):
            return name
        try:
            return resolve(full_name(key, name), folder)
        except FunctionNotFound as reason:
            ours = f"is in paceline; write paceline:{name}" if name in callbacks.__all__ else None
            advice = advice_on_value(key, name, {}, config.origin) or (ours if key.startswith("callbacks.") else None)
            problems.append(f"{key}={name!r} {advice or reason}")
            return name

    for key in FUNCTION_KEYS:
        if (value := getattr(config, key)) is not None:
            setattr(config, key, found := map_functions(value, resolved, key))
            if isinstance(value, str) and is_object(found):
                config._names[key] = full_name(key, value)
    if isinstance(config.sample_weights, str) and ":" in config.sample_weights:  # otherwise it is a column
        config.sample_weights = resolved("sample_weights", config.sample_weights)
    if isinstance(config.metrics, dict):
        config.metrics = {name: resolved(f"metrics.{name}", metric) for name, metric in config.metrics.items()}
    config.callbacks = [resolved(f"callbacks.{index}", value) for index, value in enumerate(config.callbacks)]
    return problems


def unusable_callbacks(config: Config) -> list[str]:
    """The problems with the objects and classes in `callbacks`, one sentence each; ranks call the classes."""
    problems = []
    for index, value in enumerate(config.callbacks):
        if isinstance(value, type) and issubclass(value, Callback):
            try:
                problems += wrong_methods(f"callbacks.{index}", value())
            except TypeError as error:
                problems.append(f"callbacks.{index}=<{value.__name__}> needs arguments ({error}); give an object")
        elif isinstance(value, Callback):
            problems += wrong_methods(f"callbacks.{index}", value)
        elif not isinstance(value, str):  # a name that cannot be imported has been reported
            problems.append(
                f"callbacks.{index}=<{type(value).__name__}> is not a callback; derive its class from paceline.Callback"
            )
    return problems


def _home(config: Config) -> Path | None:
    """The folder of the first function that is not from an installed package, for commands that import it by name."""
    functions = (function for key in FUNCTION_KEYS for function in functions_in(getattr(config, key)))
    return next((home for function in functions if (home := home_of(function))), None)
