"""Settings in the syntax of Python keywords, of YAML in a config, or of `key=value` words on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.yaml import parse

OPEN = "…"  # placeholder of a value that the user fills in
PYTHON, FILE, COMMAND_LINE = "Python", "a config file", "the command line"


@dataclass(frozen=True)
class Origin:
    """The places where the keys of a config were typed: Python or a file, and the keys of the command line."""

    place: str = field(default=FILE, compare=False)  # configs with the same settings are equal
    overridden: tuple[str, ...] = field(default=(), compare=False)

    def of(self, key: str) -> str:
        """The place of a key such as optimizer.lr, or of its section or inner keys."""
        inside = [f"{key}.".startswith(f"{typed}.") or typed.startswith(f"{key}.") for typed in self.overridden]
        return COMMAND_LINE if any(inside) else self.place


def written(settings: Mapping[str, Any], place: str) -> str:
    """Settings in the syntax of a place."""
    return _FORMS[place](settings)


def in_config(settings: Mapping[str, Any]) -> str:
    """The settings as YAML in one line; several keys are separated by commas."""
    return ", ".join(f"{key}: {_yaml(value)}" for key, value in settings.items())


def in_one_line(value: Any) -> str:
    """A value as YAML in one line."""
    return _yaml(value)


def _in_python(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_python(value)}" for key, value in settings.items())


def _on_command_line(settings: Mapping[str, Any]) -> str:
    words = (f"{'.'.join(path)}={_yaml(value)}" for path, value in leaves(settings))
    return " ".join(word if OPEN in word else shlex.quote(word) for word in words)


_FORMS = {PYTHON: _in_python, FILE: in_config, COMMAND_LINE: _on_command_line}


def leaves(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested settings, each with its path of keys."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{in_config(value)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str):
        return value if parse(f"[{value}]") == [value] else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_python(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, str):
        return value if value == OPEN else json.dumps(value, ensure_ascii=False)
    return repr(value)
