"""Checks paths that users give: whether they can name a file or folder of this machine."""

from __future__ import annotations

import re
from pathlib import Path

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # `Path` keeps only one of the two slashes


def problem_with(path: Path | str) -> str | None:
    """The problem with a path that no local file can have, and the fix; None if the path can be used."""
    if "\0" in str(path):
        return "contains a NUL character, which is not allowed in paths; give another path"
    if URL.match(str(path)):
        return "is a URL, which Paceline cannot read or write; give a local path"
    return None


def is_file(path: Path) -> bool:
    """Whether the file exists; False for a name that the system rejects, such as one of a thousand letters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
