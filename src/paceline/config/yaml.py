"""Configs as text: YAML as people expect it, and values as it can write them."""

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
from paceline.errors import ConfigError

MOST_VALUES = 100_000  # in a config; a few aliases can stand for billions


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with `1e-4` a number and no key given twice."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        _check_size(loaded)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # a date such as 2026-99-99, for one
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not a {type(loaded).__name__}")
    return loaded


def _check_size(tree: Any) -> None:
    """ValueError if the values, with all aliases written out, are more than any config has, or contain themselves."""
    waiting, seen = [tree], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, (dict, list, tuple, set)):
            seen += len(each)
            if seen > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES:,} values, or one that contains itself by an alias")
            waiting += each.values() if isinstance(each, dict) else each


def parse(text: str) -> Any:
    """A value of the command line, as YAML; what is none is taken as it is."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def dump_yaml(plain: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads back as it was."""
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(value: Any) -> Any:
    """A value of a config as YAML and JSON can write it: functions by name, data by its type."""
    if isinstance(value, BaseModel):
        defaults = type(value)().model_dump(by_alias=True)
        return {  # a None that is not the default says something, as in `every_minutes: null`
            key: to_plain(inner)
            for key, inner in value.model_dump(by_alias=True).items()
            if inner is not None or defaults.get(key) is not None
        }
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    # Subclasses, such as numpy's numbers, are more than YAML can write.
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
    """YAML as people expect it: `1e-4` is a number, `1:4` is none, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]  # type: ignore[no-untyped-call]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"{twice} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


# YAML 1.1 reads 1:4 as 64, in base 60.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, re.compile(r"(?!.*\d:)" + pattern.pattern, pattern.flags)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(  # type: ignore[no-untyped-call]
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
