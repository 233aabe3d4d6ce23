"""Suggests the replacement of a key or a value of another library, in Python, in a config or on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from paceline.config.keys import NAMED_SECTIONS
from paceline.config.other_names import REMOVE, TABLE, VALUES, Row
from paceline.config.written import COMMAND_LINE, OPEN, Origin, leaves, written
from paceline.config.yaml import parse
from paceline.formatting import redacted

VALUE = "VALUE"  # placeholder of the user's value in the table
LONGEST = 60  # maximum number of characters of a value that is repeated in an answer
Path = tuple[str, ...]  # the keys from the root to a value


@dataclass(frozen=True)
class Answer:
    """The settings to write instead of an unknown key, as values by their paths."""

    path: Path
    value: Any
    key: str  # its name in Paceline; empty if there is none
    words: dict[Path, Any]
    usual: frozenset[Path] = frozenset()  # the words that are overridden by the user's choices
    note: str = ""
    times: str = ""  # the key of the factor for the user's value

    @property
    def chosen(self) -> dict[Path, Any]:
        """The words that are derived from the user's value."""
        return {path: value for path, value in self.words.items() if path not in self.usual}

    @property
    def section(self) -> str:
        """The section of settings that the answer writes; else empty."""
        return next((path[0] for path in self.words if len(path) > 1), "")

    def contradicts(self, other: Answer) -> bool:
        """Whether two answers write different values under the same key."""
        return any(value != other.chosen.get(path, value) for path, value in self.chosen.items())


def answers_to(unknown: Mapping[Path, Any], given: Mapping[str, Any], origin: Origin) -> dict[Path, str]:
    """A sentence for each unknown key in the table; keys of one section, typed in one place, share a sentence.

    The words to write include the given keys of the same section, because they replace the section.
    """
    found = [answer for path, value in unknown.items() if (answer := _answer_to(path, value))]
    known = dict(chain.from_iterable(answer.chosen.items() for answer in found)) | dict(_flat(given))
    groups: dict[tuple[Any, str], list[Answer]] = {}
    for answer in (_multiplied(answer, known) for answer in found):
        shared = (answer.section or answer.path, origin.of(".".join(answer.path)))
        if any(answer.contradicts(other) for other in groups.get(shared, [])):
            shared = (answer.path, shared[1])
        groups.setdefault(shared, []).append(answer)
    kept = {path: value for path, value in _flat(given) if path not in unknown}
    return {
        answer.path: _sentence(answers, kept, place) for (_, place), answers in groups.items() for answer in answers
    }


def advice_on_value(key: str, value: Any, given: Mapping[str, Any], origin: Origin) -> str | None:
    """The rest of a sentence about a value that only other libraries have; None if the table does not contain it."""
    write, note = ("", "") if value is None else template(Row(values=VALUES.get(key, {})), value)
    if not write and not note:
        return None
    path = tuple(key.split("."))
    answer = Answer(path, value, key, dict(leaves(settings(write, value))), note=note.replace(VALUE, _text(value)))
    kept = {at: inner for at, inner in _flat(given) if at[: len(path)] != path}
    return f"has no meaning here; {_advice([answer], kept, origin.of(key))}"


def advice_on_key(name: str, value: Any, given: Mapping[str, Any]) -> str | None:
    """The rest of a sentence about a name and a value on the command line; None if the name is not in the table."""
    if (answer := _answer_to((name,), value)) is None:
        return None
    kept = dict(_flat(given))
    return _what([answer]) + "; " + _advice([_multiplied(answer, kept)], kept, COMMAND_LINE)


def setting_of(name: str, value: Any, given: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The key that a name of another library means unconditionally, its value in Paceline, and a note; else None.

    None also if the name means several settings, or if the user's value is not used or not sufficient.
    """
    known = dict(_flat(given))
    found = [_one_setting(row, name, value, known) for row in rows_of(name)]
    return found[0] if found and all(each == found[0] for each in found) else None


def _one_setting(row: Row, name: str, value: Any, known: Mapping[Path, Any]) -> tuple[str, Any, str] | None:
    write, _ = template(row, value)
    answer = _multiplied(_answer_by(row, (name,), value), known)
    is_condition = answer.note.startswith("if ") and (not row.unless or (row.unless,) in known)
    if is_condition or (row.times and answer.times):  # the factor for the value is unknown
        return None
    words = [(path, word) for path, word in answer.words.items() if path not in answer.usual or path not in known]
    patterns = dict(leaves(settings(write))) if write else {}
    if len(words) != 1 or OPEN in str(words[0][1]):
        return None
    [(path, word)] = words
    is_used = patterns[path] == VALUE if VALUE in str(write) else write != row.write or value is True
    note = "" if answer.note.startswith("if ") else answer.note
    return (".".join(path), word, note) if is_used else None


def is_switch(name: str) -> bool:
    """Whether a name of another library has no value, such as `--fp16`."""
    rows = rows_of(name)
    return bool(rows) and not any(VALUE in row.write for row in rows)


def _answer_to(path: Path, value: Any) -> Answer | None:
    """The answer to an unknown key; None if the key is not in the table."""
    *sections, name = path
    rows = [row for row in rows_of(name) if key_of(row.write) != ".".join(path)]
    rows.sort(key=lambda row: not key_of(row.write).startswith(".".join((*sections, ""))))  # of the same section first
    return _answer_by(rows[0], path, value) if rows else None


def _answer_by(row: Row, path: Path, value: Any) -> Answer:
    """The answer of one row of the table."""
    section = key_of(row.write).partition(".")[0]
    if isinstance(value, Mapping) and section != key_of(row.write):
        return Answer(path, value, section, dict(_renamed(section, value)))
    write, note = template(row, value)
    words, key = dict(leaves(settings(write, value))), key_of(write or row.write).replace(VALUE, str(value))
    is_usual = write == row.write
    patterns = zip(words, leaves(settings(write)), strict=False)
    usual = {at for at, (_, text) in patterns if is_usual and VALUE not in str(text) and text != OPEN}
    times = row.times if is_usual else ""
    return Answer(path, value, key, words, frozenset(usual), note.replace(VALUE, _text(value)), times)


def _renamed(section: str, values: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    """The values of a section of another library by their paths in Paceline."""
    for name, value in values.items():
        path = (section, str(name))
        inner = _answer_to(path, value)
        special = VALUES.get(".".join(path))
        if inner is not None and section in (inner.section, inner.key):
            yield from inner.words.items()
        elif special and (write := template(Row(values=special), value)[0]):
            yield from leaves(settings(write, value))
        else:
            yield path, _shown(value)


def _multiplied(answer: Answer, known: Mapping[Path, Any]) -> Answer:
    """The answer with the user's value multiplied by its factor, if that is known."""
    number = str(known.get((answer.times,), ""))
    if not number.isdigit() or ("nodes",) in known or not isinstance(answer.value, int):
        return answer
    words = {path: value * int(number) for path, value in answer.words.items()}
    return replace(answer, words=words, note=f"{answer.value} for each of the {number} processes", times="")


def _sentence(answers: list[Answer], kept: Mapping[Path, Any], place: str) -> str:
    names = [f"{'.'.join(answer.path)}={shortened(answer.value)}" for answer in answers]
    return f"{', '.join(names)} {_what(answers)}; {_advice(answers, kept, place)}"


def _what(answers: list[Answer]) -> str:
    """The names of these keys in Paceline, as a phrase."""
    keys = list(dict.fromkeys(answer.key for answer in answers if answer.key))
    verb = "is" if len(answers) == 1 else "are"
    return f"{verb} called {', '.join(keys)} in Paceline" if keys else f"{verb} not a key of Paceline"


def _advice(answers: list[Answer], kept: Mapping[Path, Any], place: str) -> str:
    """The words to write and the notes of all these answers."""
    chosen = dict(chain.from_iterable(answer.chosen.items() for answer in answers))
    sections = {path[0] for answer in answers for path in answer.words if len(path) > 1}
    same = {path: value for path, value in kept.items() if path[0] in sections and len(path) > 1}
    # Words of the command line change single keys; those of the other places replace a section.
    values = {} if place == COMMAND_LINE else dict(same)
    for answer in answers:
        values |= {at: value for at, value in answer.words.items() if at not in answer.usual or at not in same}
    if place == COMMAND_LINE and not values | chosen:  # all of them are already given
        values = answers[0].words
    tree = _tree((values | chosen).items())
    if isinstance(metrics := kept.get(("metrics",)), (str, list, tuple)) and isinstance(tree.get("metrics"), str):
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        tree["metrics"] = list(dict.fromkeys([*names, tree["metrics"]]))
    words = f"write {written(tree, place)}" if tree else ""
    return ", ".join(dict.fromkeys(filter(None, (words, *(answer.note for answer in answers)))))


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The user's settings by their paths, with the names of sections that are given only by name."""
    sections = {key: {"name": value} if key in NAMED_SECTIONS and isinstance(value, str) else value
        for key, value in given.items()}  # fmt: skip
    return ((path, _shown(value)) for path, value in leaves(sections))


def _tree(values: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Nested settings from values by their paths."""
    root: dict[str, Any] = {}
    for path, value in values:
        target = root
        for section in path[:-1]:
            target = target.setdefault(section, {})
        target[path[-1]] = value
    return root


def shortened(value: Any) -> str:
    """A value in one line of limited length."""
    text = redacted(" ".join(repr(value).split()))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def rows_of(name: str) -> list[Row]:
    """The rows of the table that have a name."""
    return [row for rows in TABLE.values() for row in rows if name in row.names]


def key_of(write: str) -> str:
    """The key in a piece of YAML, such as optimizer.lr: the key with the user's value, or the first key."""
    found = sorted(leaves(settings(write)), key=lambda leaf: VALUE not in str(leaf[1]))
    return ".".join(found[0][0]) if found else ""


def template(row: Row, value: Any) -> tuple[str, str]:
    """The YAML to write instead of this value under one of the row's names, and a note about it."""
    if value is None:
        return "", REMOVE
    special = next((row.values[kind] for kind in _kinds(value) if kind in row.values), None)
    if special is None:
        return row.write, row.note
    write, _, note = special.removeprefix("write ").partition("; ")
    return (write, note) if special.startswith("write ") else ("", special)


def settings(write: str, value: Any = VALUE) -> dict[str, Any]:
    """The settings in a piece of YAML of the table, with the user's value in place of VALUE."""
    filled: dict[str, Any] = _filled(parse(f"{{{write}}}"), _shown(value))
    return filled


def _kinds(value: Any) -> list[str]:
    """The keys to look up the advice about a value: the value in lower case, then its kinds."""
    if isinstance(value, (list, tuple)):
        is_one_name = len(value) == 1 and isinstance(value[0], str)
        return _kinds(value[0]) if is_one_name else ["list"] if value else ["none"]
    if isinstance(value, float):
        kinds = ["fraction"] * (0 < value < 1) + ["decimal"] * (not value.is_integer())
        return ["0" if value == 0 else str(value), *kinds]
    if isinstance(value, str):
        is_table = value.lower().endswith((".csv", ".gz", ".parquet"))
        return [value.lower(), *(["table"] if is_table else [] if value.isdigit() else ["text"])]
    if isinstance(value, int) or type(value).__name__ == "dtype":
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return [str(value).lower().removeprefix("torch."), *(["count"] if is_count else [])]
    if isinstance(value, Mapping):
        return ["section"]
    return ["table"] if hasattr(value, "columns") else []


def _filled(tree: Any, value: Any, key: str = "") -> Any:
    """The settings with the user's value; an ellipsis if a function is needed and the value is not the name of one."""
    if isinstance(tree, dict):
        return {each.replace(VALUE, str(value)): _filled(inner, value, each) for each, inner in tree.items()}
    if isinstance(tree, list):
        return [_filled(inner, value) for inner in tree]
    if key == "name" and tree == VALUE and isinstance(value, str):
        return re.sub(r"[^\w.-]+", "-", value) if value != OPEN else value
    if tree != VALUE:
        return tree.replace(VALUE, str(value)) if isinstance(tree, str) else tree
    is_name = isinstance(value, str) and (":" in value or key == "loss_fn" or value == VALUE)
    return value if is_name or not key.endswith("_fn") else OPEN


def _shown(value: Any) -> Any:
    """A short simple value, or a list or section of short values; an ellipsis for any other value."""
    if isinstance(value, Mapping):
        return {str(key): _shown(inner) for key, inner in value.items()}
    parts = value if isinstance(value, (list, tuple)) else [value]
    is_simple = all(isinstance(part, (str, int, float)) for part in parts)
    return value if is_simple and len(str(value)) <= LONGEST else OPEN


def _text(value: Any) -> str:
    return str(_shown(value))
