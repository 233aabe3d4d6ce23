"""Paths that people give: what keeps one from naming a file or folder of this machine."""

from __future__ import annotations

import re
from pathlib import Path

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # of the two slashes, `Path` keeps one


def problem_with(path: Path | str) -> str | None:
    """Why nothing on this machine can have this path, with what to do; None if it can be used."""
    if "\0" in str(path):
        return "has a NUL character in it, as no path can; give another path"
    if URL.match(str(path)):
        return "is a URL, which Paceline cannot read or write; give a local path"
    return None


def is_file(path: Path) -> bool:
    """Whether a file is there; also False for a name that the system refuses, such as one of a thousand letters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
