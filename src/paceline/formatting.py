"""Short texts for numbers and results, and text that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Control characters except newline and tab, characters that change the direction of text, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# In URLs: the user and password, but not the user alone of sftp and ssh; and the query.
USER = re.compile(r"(\b(?!sftp:|ssh:)[A-Za-z][A-Za-z0-9+.-]+:/+|\b(?:sftp|ssh):/+[^\s'\":@]*:)[^\s'\"]*@")
QUERY = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]+:/[^\s'\"?#]*[?#])[^\s'\"]+")  # or a fragment


def ranks_text(count: int) -> str:
    """A number of ranks, such as "1 rank" or "4 ranks"."""
    return "1 rank" if count == 1 else f"{count} ranks"


def outcome_text(step: int, metrics: Mapping[str, float], weights_sha256: str) -> str:
    """The result of a run, such as "step 230  val_loss 0.0339  accuracy 0.9944  weights dc374501131c"."""
    measured = [f"{name} {value:.4f}" for name, value in metrics.items()]
    return "  ".join([f"step {step}", *measured, f"weights {weights_sha256[:12]}"])


def printable(text: str) -> str:
    """The text with control characters escaped as `\\x1b`, which a terminal would otherwise interpret."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def redacted(text: str) -> str:
    """The text without user names, passwords and queries in URLs."""
    return QUERY.sub(r"\1***", USER.sub(r"\1***@", text))


def size_text(size: float) -> str:
    """A number of bytes, such as "1.5 GB"."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return f"{size / unit:,.1f} {name}"


def duration(seconds: float) -> str:
    """A time in one or two units, such as "50 s", "12 min" or "3 h 05 min"."""
    whole = max(round(seconds), 0)
    minutes = round(seconds / 60)
    if whole < 90:
        return f"{whole} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 36 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
