"""The search space: the config keys that are searched, and the values of each (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config import override
from paceline.errors import ConfigError

KINDS = ("uniform", "log", "int", "logint")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
IN_BRACKETS = re.compile(r"(\w*)\((.*)\)")
BY_COLONS = re.compile(rf"({'|'.join(KINDS)}):({NUMBER}(?::{NUMBER})*)")
LOOKS_LIKE_NUMBERS = re.compile(rf"\s*{NUMBER}\s*(,\s*{NUMBER}\s*)*")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False
    is_int: bool = False
    step: float | None = None

    def __str__(self) -> str:
        kind = KINDS[2 * self.is_int + self.is_log]
        return f"{kind}({', '.join(f'{n:g}' for n in (self.low, self.high, self.step) if n is not None)})"

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values to check a config with. One of them is a fraction, which fails for keys that require integers."""
        between = self.low + 0.3819 * (self.high - self.low)
        return (self.low, self.high) if self.is_int or self.step else (self.low, self.high, between)


@dataclass(frozen=True)
class Choices:
    """A few values without an order."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(json.dumps, self.values))}}}"

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values to check a config with."""
        return self.values


Space = dict[str, Range | Choices]


def parse(words: Iterable[str]) -> tuple[Space, list[str]]:
    """The keys to search among KEY=VALUE words, and the words that set a key to one value.

    A key that is given several times is searched among its values, because a shell expands `key={1,2,3}` that way.
    """
    given: dict[str, list[str]] = {}
    fixed, problems = [], []
    for word in words:
        key, separator, text = word.partition("=")
        if separator:
            given.setdefault(key, []).append(text)
        else:
            fixed.append(word)  # `override` reports what is wrong with it
    space: Space = {}
    for key, texts in given.items():
        try:
            domain = _domain(texts)
        except ValueError as error:
            problems.append(f"{key}={' '.join(texts)} {error}")
            continue
        if domain is None:
            fixed.append(f"{key}={texts[0]}")
        else:
            space[key] = domain
    if problems:
        raise ConfigError(problems)
    return space, fixed


def examples_of(space: Space) -> list[dict[str, Any]]:
    """A few sets of values, in which both ends of each range and every choice occur."""
    number = max((len(domain.examples) for domain in space.values()), default=1)
    return [{key: domain.examples[n % len(domain.examples)] for key, domain in space.items()} for n in range(number)]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The KEY=VALUE words that set these values."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _domain(texts: list[str]) -> Range | Choices | None:
    """The range or choices of one key; None for a single value. Raises ValueError with the problem."""
    ranges = [found for text in texts if (found := _range(text)) is not None]
    if ranges and len(texts) > 1:
        raise ValueError("mixes a range with other values; write one range, or only values")
    if ranges:
        return ranges[0]
    values: list[Any] = []
    for text in texts:
        values += _values(text)
    try:
        distinct = {json.dumps(value): value for value in values}
    except TypeError:
        raise ValueError("contains values that are not numbers or text; put dates in quotes") from None
    is_one = len(distinct) == 1 and not _is_set(_read(texts[0]))
    return None if is_one else Choices(tuple(distinct.values()))


def _values(text: str) -> list[Any]:
    value = _read(text)
    if _is_set(value):
        return list(value)
    if text.startswith("{") and not isinstance(value, dict):
        raise ValueError("is not a set of values; write {a, b, c}, each once")
    return [value]


def _read(text: str) -> Any:
    raw: dict[str, Any] = {}
    override(raw, [f"value={text}"])
    return raw["value"]


def _is_set(value: Any) -> bool:
    """Whether this is a set such as {32, 64}, which YAML reads as keys without values."""
    return isinstance(value, dict) and bool(value) and all(inner is None for inner in value.values())


def _range(text: str) -> Range | None:
    text = text.strip()
    if match := BY_COLONS.fullmatch(text):
        return _checked(match[1], match[2].split(":"))
    match = IN_BRACKETS.fullmatch(text)
    if match is None or (match[1] not in KINDS and not LOOKS_LIKE_NUMBERS.fullmatch(match[2])):
        return None
    if match[1] and match[1] not in KINDS:
        raise ValueError(f"is not a known kind of range; use {', '.join(KINDS)}")
    if not LOOKS_LIKE_NUMBERS.fullmatch(match[2]):
        raise ValueError(f"is not a range of numbers; write, for example, {match[1]}(1,10)")
    return _checked(match[1] or "uniform", match[2].split(","))


def _checked(kind: str, texts: list[str]) -> Range:
    numbers: list[float] = [float(text) for text in texts]
    is_log, is_int = kind.startswith("log"), kind.endswith("int")
    if len(numbers) not in (2, 3) or (is_log and len(numbers) == 3):
        raise ValueError(f"needs two numbers{'' if is_log else ', or three with a step'}; write {kind}(low,high)")
    if is_int:
        if not all(number.is_integer() for number in numbers):
            raise ValueError(f"needs integers; use {kind.replace('int', '') or 'uniform'} for other numbers")
        numbers = [int(number) for number in numbers]
    low, high, step = (*numbers, None)[:3]
    assert low is not None
    assert high is not None
    if low >= high:
        raise ValueError("ends below its start; give the smaller number first")
    if is_log and low <= 0:
        raise ValueError(f"starts at {low:g}; the ends of a logarithmic range must be above 0")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"has the step {step:g}; use a step above 0 that is smaller than the range")
    return Range(low, high, is_log=is_log, is_int=is_int, step=step)
