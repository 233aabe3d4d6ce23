"""Checks paths that users give: whether they can name a file or folder of this machine, or a place in a store."""

from __future__ import annotations

import re
from pathlib import Path

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # `Path` keeps only one of the two slashes
FILE_ON_HOST = re.compile("file://[^/]")
WITH_USER = ("sftp", "ssh")  # protocols whose URLs may name a user
READ_ONLY = ("http", "https")
CREDENTIALS = (
    "contains a user name, password or key; remove it and give it to the library of the store: in its environment "
    "variables (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, …) or its files (~/.aws/credentials, ~/.ssh)"
)


def problem_with(path: Path | str) -> str | None:
    """The problem with a path that no local file can have, and the fix; None if the path can be used."""
    if "\0" in str(path):
        return "contains a NUL character, which is not allowed in paths; give another path"
    if URL.match(str(path)):
        return "is a URL, which Paceline cannot read or write; give a local path"
    return None


def is_url(place: Path | str) -> bool:
    """Whether a text is a URL such as s3://bucket/folder, and not a path."""
    return URL.match(str(place)) is not None


def as_url(place: Path | str) -> str:
    """A URL as text, also one given as a `Path`, which drops one of the two slashes; a path for file: and for paths."""
    if not is_url(place):
        return str(place)
    scheme, _, rest = str(place).partition(":")
    return f"/{rest.lstrip('/')}" if scheme == "file" else f"{scheme}://{rest.lstrip('/')}"


def problem_with_place(place: Path | str) -> str | None:
    """The problem with a folder or URL at which runs are mirrored, and the fix; None if it can be used."""
    url = as_url(place)
    if "::" in url:
        return "chains several protocols; give one, such as s3://bucket/folder"
    if FILE_ON_HOST.match(str(place)):
        return "names a host; give a folder of this machine, such as /mnt/backup"
    if not is_url(url):
        return problem_with(url) if url.strip() else "is empty; give a folder or a URL"
    scheme, _, rest = url.partition("://")
    user, at, _ = rest.rpartition("@")
    has_user = bool(at) and ("@" in rest.partition("/")[0]) and scheme.lower() not in WITH_USER
    if has_user or (at and ":" in user) or "?" in rest or "#" in rest:
        return CREDENTIALS
    if scheme.lower() in READ_ONLY:
        return "can only be read; give a folder, or a URL such as s3://bucket/folder"
    return None if rest.strip("/") else "names no bucket or host; give one, such as s3://bucket/folder"


def is_file(path: Path) -> bool:
    """Whether the file exists; False for a name that the system rejects, such as one of a thousand letters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
