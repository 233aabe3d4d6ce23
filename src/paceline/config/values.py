"""Values as users write them, such as a single name, `1h30m` or `1:4`: the reader and the JSON schema of each.

A reader converts the given value to the value in the config, or raises a ValueError whose text
follows the key and the value in a message.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from paceline.system.paths import as_url, is_url, problem_with, problem_with_place

FunctionName = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[^:]+:.+$"})]  # "module:name"
Function = Callable[..., Any] | FunctionName
PositiveNumber = Annotated[float, Field(gt=0)]
Mode = Literal["min", "max"]  # whether lower or higher values of a metric are better
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d)")


REQUIRED = "required"


@dataclass(frozen=True)
class Otherwise:
    """For the documentation: the rule that applies if a key is not given, if its default does not show it."""

    text: str


def listed(value: Any) -> Any:
    """A single name, as a list with this name."""
    return [value] if isinstance(value, str) else value


def named(value: Any) -> Any:
    """A single name, as a section with this name and defaults for the rest."""
    return {"name": value} if isinstance(value, str) else value


def false_as(word: str) -> BeforeValidator:
    """Replaces False by a word: YAML reads `off` and `no` as False."""
    return BeforeValidator(lambda value: word if value is False else value)


def named_metrics(value: Any) -> Any:
    """Metrics as a list of names or a dict of functions; raises a ValueError for other values."""
    if isinstance(value, dict):
        for name, metric in value.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"has the name {name!r}, which is not a string; use {{name: function(output, target)}}"
                )
            if isinstance(metric, type):
                raise ValueError(f"has the class {metric.__name__} as {name}; pass an instance of it, or a function")
            if not (callable(metric) or isinstance(metric, str) or hasattr(metric, "compute")):
                raise ValueError(f"has {name}={metric!r}, which is not a function; use a function(output, target)")
        return value
    names = listed(value)
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError("is not a list of names; for your own functions, use {name: function(output, target)}")
    return list(names)


def with_mode(value: Any) -> Any:
    """Rejects a metric without a mode, unless it is a loss."""
    metric = value.get("metric") if isinstance(value, dict) and value.get("mode") is None else None
    if isinstance(value, str) or (isinstance(metric, str) and not metric.endswith("loss")):
        forms = " or ".join(f"{{metric: {metric or value}, mode: {mode}}}" for mode in ("max", "min"))
        raise ValueError(f"needs a mode: whether higher or lower is better; write {forms}")
    return value


def seconds(value: Any) -> Any:
    """The seconds of a duration such as 90, "1h30m" or "1:30:00"."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = CLOCK.fullmatch(text) or DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError("must be a number of seconds, or a duration such as 1h30m or 1:30:00")
    hours, minutes, rest = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + rest


def number_or_range(what: str) -> Callable[[Any], Any]:
    """A reader of a positive number, or of a range "least:most"; `what` is the counted thing, for the message."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"must be a number of {what}, or least:most such as 1:4")
        return match[0] if match[2] else int(match[1])

    return read


def ends(value: int | str | None) -> tuple[int, int] | None:
    """The lowest and highest number of a range."""
    if value is None:
        return None
    least, _, most = str(value).partition(":")
    return int(least), int(most or least)


def minutes_or_auto(value: Any) -> Any:
    """A positive number of minutes, or "auto"."""
    if value is None or value == "auto":
        return value
    try:
        minutes = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        minutes = math.nan
    if math.isnan(minutes):
        raise ValueError("must be a number of minutes, auto, or null for never")
    if minutes <= 0:
        raise ValueError("must be greater than 0")
    return minutes


def address(value: Any) -> Any:
    """Rejects values other than HOST:PORT."""
    match = re.fullmatch(r"[^:\s]+:(\d{1,5})", str(value).strip())
    if value is not None and (match is None or not 1 <= int(match[1]) <= 65_535):
        raise ValueError("must be a host and a port, such as n1:29400")
    return value


def packed(value: Any) -> Any:
    """A list of numbers as an array: config.yaml would list them all."""
    if not isinstance(value, (list, tuple)):
        return value
    try:
        return array("d", value)
    except TypeError:
        raise ValueError("must be numbers, one for each sample") from None


def local(value: Any) -> Any:
    """Rejects values that cannot be a path on this machine, such as a URL."""
    if isinstance(value, (str, Path)) and (problem := problem_with(value)):
        raise ValueError(problem)
    return value


def mirror_place(value: Any) -> Any:
    """Rejects values at which runs cannot be mirrored, and URLs with credentials."""
    if not isinstance(value, (str, Path)):
        return value
    if problem := problem_with_place(value):
        raise ValueError(problem)
    return as_url(value)


def run_or_mirror(value: Any) -> Any:
    """Rejects values that are neither a path on this machine nor the URL of a mirrored run."""
    return mirror_place(value) if isinstance(value, (str, Path)) and is_url(value) else local(value)


def path_as_text(value: Any) -> Any:
    """A path as text."""
    return str(value) if isinstance(value, Path) else value
