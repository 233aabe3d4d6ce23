"""Settings as the user types them: keywords in Python, YAML in a config, `key=value` words on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.config.yaml import parse

OPEN = "…"  # stands for a value that the user knows
PYTHON = ("in Python",)
FILE = ("in a config", "on the command line")
EVERYWHERE = (*PYTHON, *FILE)


def written(settings: Mapping[str, Any], places: Sequence[str]) -> str:
    """Settings as text for each of these places; followed by the place if there are several."""
    texts = {place: _FORMS[place](settings) for place in places}
    return ", ".join(f"{text} {place}" if len(places) > 1 else text for place, text in texts.items())


def in_config(settings: Mapping[str, Any]) -> str:
    """The settings as YAML in one line; several keys are separated by commas."""
    return ", ".join(f"{key}: {_yaml(value)}" for key, value in settings.items())


def _in_python(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_python(value)}" for key, value in settings.items())


def _on_command_line(settings: Mapping[str, Any]) -> str:
    words = (f"{'.'.join(path)}={_yaml(value)}" for path, value in leaves(settings))
    return " ".join(word if OPEN in word else shlex.quote(word) for word in words)


_FORMS = {"in Python": _in_python, "in a config": in_config, "on the command line": _on_command_line}


def leaves(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested settings, each with the keys that lead to it."""
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
