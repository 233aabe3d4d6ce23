"""Pydantic's validation errors as sentences of the form `<key>=<value> <what is wrong>; <what to do>`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.answers import advice_for, advice_on_value
from paceline.config.schema import FUNCTION_KEYS, Config
from paceline.config.written import FILE

_MADE_BY = {  # how to give an object where a section of settings is expected
    "optimizer": "write optimizer_fn, a function of the model that returns it",
    "schedule": "write scheduler_fn, a function of the optimizer that returns it",
}


def problems_of(error: ValidationError, places: Sequence[str] = FILE) -> list[str]:
    """One sentence for each mistake that pydantic found in a config, which the user wrote in one of the places."""
    return list(dict.fromkeys(_describe(detail, places) for detail in error.errors(include_url=False)))


def _describe(detail: ErrorDetails, places: Sequence[str]) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown([str(part) for part in detail["loc"]], detail["input"], places)
    # For a union, the location also names the branch that failed, such as "list[str]"; the user knows only the key.
    path = [part for part in detail["loc"] if isinstance(part, str) and not re.search(r"[\[(-]", part)]
    path = [part for part in path if part not in ("str", "callable", "bool")]
    key = ".".join(path)
    if advice := advice_on_value(key, detail["input"], places):
        return f"{key}={_short(detail['input'])} {advice}"
    if key in _MADE_BY:
        return f"{key}={_short(detail['input'])} is neither a name nor a section; to give an object, {_MADE_BY[key]}"
    if path[0] in FUNCTION_KEYS and detail["type"] != "value_error":
        return f'{key}={_short(detail["input"])} is not a function; give a function, or "module:name" in a config'
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}={_short(detail['input'])} {message[0].lower()}{message[1:]}"


def _unknown(path: list[str], value: Any, places: Sequence[str]) -> str:
    """A sentence about an unknown key: what it is called here if another library has it, else what is similar."""
    key = ".".join(path)
    if advice := advice_for(path[:-1], path[-1], value, places):
        return f"{key}={_short(value)} {advice}"
    return f"{key} is not a known key; {_hint(path)}"


def _hint(path: list[str]) -> str:
    """What the user may have meant: a key that is spelled almost the same, or the same word inside a section."""
    *sections, last = path
    known = _known_keys(sections)
    near = difflib.get_close_matches(last, known, n=1, cutoff=0.75)
    near = near or [f"{key}.{last}" for key in known if not sections and last in _known_keys([key])]
    meant = " or ".join(".".join([*sections, key]) for key in near)
    return f"did you mean {meant}?" if meant else f"known keys: {', '.join(known)}"


def _known_keys(sections: list[str]) -> list[str]:
    """The keys of a section, given by the names that lead to it; empty if it is not a section."""
    model: type[BaseModel] = Config
    for section in sections:
        annotation = model.model_fields[section].annotation
        annotation = next((part for part in get_args(annotation) if part is not type(None)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
