"""What to write instead of a key or a value of another library, in Python, in a config or on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.config.other_names import REMOVE, TABLE, VALUES, Row
from paceline.config.written import EVERYWHERE, OPEN, leaves, written
from paceline.config.yaml import parse

VALUE = "VALUE"  # stands for the user's value in the table
LONGEST = 60  # characters of a value that is repeated in an answer


def advice_for(sections: Sequence[str], name: str, value: Any, places: Sequence[str] = EVERYWHERE) -> str | None:
    """The rest of a sentence about an unknown key, "is called … here; write …"; None if the table does not have it."""
    own = ".".join((*sections, name))
    rows = [row for row in rows_of(name) if key_of(row.write) != own]
    rows.sort(key=lambda row: not key_of(row.write).startswith(".".join((*sections, ""))))  # of the same section first
    if not rows:
        return None
    write, note = template(rows[0], value)
    key = key_of(write or rows[0].write).replace(VALUE, str(value))
    return f"{f'is called {key} here' if key else 'is not a key here'}; {_advice(write, note, value, places)}"


def advice_on_value(key: str, value: Any, places: Sequence[str]) -> str | None:
    """The rest of a sentence about a value that only other libraries have; None if the table does not have it."""
    row = Row(values=VALUES.get(key, {}))
    write, note = ("", "") if value is None else template(row, value)
    return f"is not a value here; {_advice(write, note, value, places)}" if write or note else None


def rows_of(name: str) -> list[Row]:
    """The rows of the table that have a name."""
    return [row for rows in TABLE.values() for row in rows if name in row.names]


def key_of(write: str) -> str:
    """The key in a piece of YAML, such as optimizer.lr: the one that gets the user's value, else the first one."""
    found = sorted(leaves(settings(write)), key=lambda leaf: VALUE not in str(leaf[1]))
    return ".".join(found[0][0]) if found else ""


def template(row: Row, value: Any) -> tuple[str, str]:
    """The YAML to write instead of giving this value under one of the row's names, and a note about it."""
    if value is None:
        return "", REMOVE
    special = next((row.values[kind] for kind in _kinds(value) if kind in row.values), None)
    if special is None:
        return row.write, row.note
    write, _, note = special.removeprefix("write ").partition("; ")
    return (write, note) if special.startswith("write ") else ("", special)


def settings(write: str, value: Any = VALUE) -> dict[str, Any]:
    """The settings in a piece of YAML of the table, with the user's value in place of VALUE."""
    filled: dict[str, Any] = _filled(parse(f"{{{write}}}"), _repeatable(value))
    return filled


def _advice(write: str, note: str, value: Any, places: Sequence[str]) -> str:
    words = f"write {written(settings(write, value), places)}" if write else ""
    return ", ".join(filter(None, (words, note.replace(VALUE, str(_repeatable(value))))))


def _kinds(value: Any) -> list[str]:
    """What the advice about a value is looked up by: the value in lower case, then what kind of value it is."""
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
    return ["table"] if hasattr(value, "columns") else []


def _filled(tree: Any, value: Any, key: str = "") -> Any:
    """The settings with the user's value; an ellipsis where a function is needed and the value does not name one."""
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


def _repeatable(value: Any) -> Any:
    """A short simple value, or a list of such; an ellipsis for any other."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    is_simple = all(isinstance(part, (str, int, float)) for part in parts)
    return value if is_simple and len(str(value)) <= LONGEST else OPEN
