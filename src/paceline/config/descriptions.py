"""The keys of a config as text: the purpose and the default of each, from its field in `Config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo

from paceline.config.sections import Section
from paceline.config.values import REQUIRED, Otherwise

_MORE = re.compile(r"\s*\(\[[^]]*\]\([^)]*\)\)")  # a link in parentheses
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section of settings under a key; None if the key has a plain value."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key such as `seed` or `optimizer.lr`, each section before its keys."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        if inner := section_of(field):
            yield from keys_of(inner, f"{key}.")


def description_of(field: FieldInfo) -> str:
    """The description of a key, in one line of Markdown."""
    return " ".join((field.description or "").split())


def without_links(text: str) -> str:
    """Markdown with only the texts of links; links to more about a key are removed."""
    return _LINK.sub(r"\1", _MORE.sub("", text))


def summary_of(field: FieldInfo) -> str:
    """The first sentence of a description, without links."""
    text = without_links(description_of(field))
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def default_of(field: FieldInfo) -> str:
    """The default of a key in Markdown, or the rule that applies if it is not given; empty if there is neither."""
    otherwise = next((each.text for each in field.metadata if isinstance(each, Otherwise)), None)
    if otherwise is not None or field.is_required():
        return otherwise or REQUIRED
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = getattr(value, "name", None)
    if value is None or value in ([], {}):
        return ""
    return f"`{value}`" if isinstance(value, str) else json.dumps(value)
