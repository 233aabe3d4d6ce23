"""Files of data sets from a folder or a mirror that the user names, instead of the known mirrors.

A file is copied as it is distributed, or else its contents, plain or as .gz, which are stored unpacked. Each file is
written as NAME.part and renamed when its SHA-256 matches the catalog.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from paceline import __version__
from paceline.errors import ConfigError, DataError
from paceline.hub.catalog import RemoteFile, UnpackedFile

TIMEOUT_S = 20.0
CHUNK_BYTES = 1 << 18
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def is_url(source: str) -> bool:
    """Whether a source is a URL; otherwise it is a folder."""
    return "://" in source


def places_in(source: str, name: str) -> list[str]:
    """The places to search for a data set's files: the folder or mirror, and its subfolder with the data set's name."""
    if is_url(source):
        url = urlsplit(source)
        if url.scheme != "https" and not (url.scheme == "http" and url.hostname in LOCAL_HOSTS):
            raise ConfigError(f"--from {source} is not an https:// address; only localhost may use http://")
    elif not Path(source).is_dir():
        raise ConfigError(f"--from {source} is not a folder; give a folder or an https:// address")
    base = source.rstrip("/")
    return [f"{base}/", f"{base}/{name}/"]


def take(places: Sequence[str], file: RemoteFile, folder: Path) -> list[str]:
    """Copy a file, or else its contents, from the first place that has it; return the names of the new files."""
    if name := _copied(places, file.name, [file.sha256], folder / file.name):
        return [name]
    if names := take_contents(places, file, folder):
        return names
    known = {file.name: file.sha256}
    for form in (form for content in file.contents for form in content.forms if form.sha256):
        known.setdefault(form.path, form.sha256)
    names = [f"{name} (SHA-256 {sha256})" for name, sha256 in known.items()]
    raise DataError(f"{places[0]} does not contain {', '.join(names)}; give another folder, or omit --from")


def take_contents(places: Sequence[str], file: RemoteFile, folder: Path) -> list[str]:
    """Copy the contents of a file from the first places that have them; return their names, none if one is missing."""
    names = [_taken(places, content, folder) for content in file.contents]
    return names if all(names) else []


def _taken(places: Sequence[str], content: UnpackedFile, folder: Path) -> str:
    """Copy one form of a file's contents, plain or as .gz; return its name, empty if no place has it."""
    forms = [form for form in content.forms if form.sha256]
    for name in dict.fromkeys(form.path for form in forms):
        accepted = [form.sha256 for form in forms if form.path == name]
        for suffix in ("", ".gz"):
            if copied := _copied(places, name + suffix, accepted, folder / name):
                return copied
    return ""


def _copied(places: Sequence[str], name: str, accepted: Collection[str], path: Path) -> str:
    """Copy a file to `path` from the first place that has it, .gz files unpacked; empty if no place has it."""
    is_packed = name == f"{path.name}.gz"
    for place in places:
        with _opened(place + name) as stream:
            if stream is None:
                continue
            part = path.with_name(f"{path.name}.part")
            try:
                found = _write(gzip.GzipFile(fileobj=stream) if is_packed else stream, part)
                if found in accepted:
                    part.replace(path)
                    return path.name
            except (EOFError, gzip.BadGzipFile, zlib.error, http.client.HTTPException, TimeoutError) as error:
                raise DataError(f"{place}{name} is damaged: {error}; copy the original file there") from None
            finally:
                part.unlink(missing_ok=True)
        what = "contains a file with" if is_packed else "has"
        raise DataError(
            f"{place}{name} {what} the SHA-256 {found}, not {' or '.join(accepted)}; replace it with the original file"
        )
    return ""


@contextmanager
def _opened(location: str) -> Iterator[IO[bytes] | None]:
    """Open a file or an address to read; None if it does not exist."""
    if not is_url(location):
        if not Path(location).is_file():
            yield None
            return
        with Path(location).open("rb") as stream:
            yield stream
        return
    request = urllib.request.Request(location, headers={"User-Agent": f"paceline/{__version__}"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except OSError as error:  # also of a server that answers 404
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        yield None
        return
    with closing(response):
        yield response


def _write(stream: IO[bytes] | gzip.GzipFile, path: Path) -> str:
    """Write a stream to a file; return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
