"""Reads and writes configs as YAML, without the unexpected conversions of YAML 1.1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from paceline.config.functions import name_of
from paceline.config.phases import Every
from paceline.errors import ConfigError

MOST_VALUES = 100_000  # in a config; a few nested aliases can expand to billions


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `1e-4` is a number, and a repeated key is an error."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        _check_size(loaded)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # such as a date 2026-99-99
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must contain `key: value` lines, not a {type(loaded).__name__}")
    return loaded


def _check_size(tree: Any) -> None:
    """Raise ValueError if there are too many values with all aliases expanded, or if a value contains itself."""
    pending, count = [tree], 0
    while pending:
        node = pending.pop()
        if isinstance(node, (dict, list, tuple, set)):
            count += len(node)
            if count > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES:,} values, or an alias that contains itself")
            pending += node.values() if isinstance(node, dict) else node


def parse(text: str) -> Any:
    """A value from the command line, read as YAML; the text itself if it is not valid YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def dump_yaml(plain: Mapping[str, Any]) -> str:
    """A mapping as YAML text, which `read_yaml` reads back with the same values."""
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(value: Any) -> Any:
    """A config value converted to types of YAML and JSON: functions by name, tables by their type."""
    if isinstance(value, BaseModel):
        defaults = type(value)().model_dump(by_alias=True)
        return {  # None is kept if the default is another value, as in `every_minutes: null`
            key: to_plain(inner)
            for key, inner in value.model_dump(by_alias=True).items()
            if inner is not None or defaults.get(key) is not None
        }
    if isinstance(value, Every):
        value = value.to_plain()
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    # YAML cannot write subclasses of these types, such as numpy's numbers.
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    return name_of(value) if callable(value) else f"<{type(value).__name__}>"


def dotted_items(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """The keys that are set, such as `optimizer.lr`, with simple values: a list becomes JSON text."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from dotted_items(value, f"{prefix}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{key}", value
        elif value:
            yield f"{prefix}{key}", json.dumps(value, default=str, skipkeys=True)


class _Loader(yaml.SafeLoader):
    """Reads `1e-4` as a number and `1:4` as text, and rejects a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]  # type: ignore[no-untyped-call]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.MarkedYAMLError(problem=f"{repeated} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


# YAML 1.1 reads 1:4 as 64, a number in base 60.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, re.compile(r"(?!.*\d:)" + pattern.pattern, pattern.flags)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(  # type: ignore[no-untyped-call]
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
