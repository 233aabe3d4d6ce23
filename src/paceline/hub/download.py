"""Bringing the files of a data set: from mirrors in turn, going on where a download was cut, whole or not at all.

A file grows as NAME.part and gets its name when its checksum is right, so what has its name can be trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import http.client
import os
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from paceline import __version__
from paceline.errors import DataError
from paceline.hub import catalog
from paceline.hub.catalog import File

TIMEOUT_S = 20.0
ATTEMPTS = 5  # at one mirror, as long as each brings more
CHUNK = 1 << 18
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}

Say = Callable[[str], None]
OnBytes = Callable[[int], None]  # how many bytes of the file are there now


def get(name: str, to: Path | None = None, say: Say = print) -> Path:
    """Bring a data set's files into `to`, $PACELINE_HOME/datasets/NAME by default; the folder they are in then."""
    known = catalog.find(name)
    folder = to or catalog.folder_of(name)
    missing = []
    for file in known.files:
        if is_there(folder, file):
            say(f"{file.name} is already there")
        else:
            missing.append(file)
    for number, file in enumerate(missing):
        urls = [mirror + file.name for mirror in known.mirrors]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _bar(file) as on_bytes:
                fetch(urls, file, folder / file.name, on_bytes)
        except OSError as error:
            raise DataError(f"{folder.resolve()} cannot be written to: {error.strerror}; use --to DIR") from None
        except _NotHad as reasons:
            names = ", ".join(file.name for file in missing[number:])
            raise DataError(
                f"{file.name} could not be downloaded ({reasons}); put {names} into {folder.resolve()} by hand, "
                "or run this again with a network"
            ) from None
        say(f"{file.name} downloaded, its checksum is right")
    return folder


def is_there(folder: Path, file: File) -> bool:
    """Whether a file, or what is in it, can be used as it lies in the folder."""
    path = folder / file.name
    if all(_has_size(folder / content.path, content.size) for content in file.contents):
        return True
    if _has_size(path, file.size) and _sha256(path) == file.sha256:
        return True
    # Others pack the same content otherwise (Debian does); gzip carries a checksum of its own.
    return file.name == f"{file.contents[0].path}.gz" and _unpacked_size(path) == file.contents[0].size


class _NotHad(Exception):
    """Every mirror failed; the text has a reason for each."""


class _Cut(Exception):
    """A download ended before the file did."""


def fetch(urls: Sequence[str], file: File, path: Path, on_bytes: OnBytes = lambda size: None) -> None:
    """Download one file to `path` from the first mirror that gives it whole."""
    part = path.with_name(f"{path.name}.part")
    reasons = []
    with part.open("ab") as stream, _lock(stream, part):
        for url in urls:
            reason = _try_mirror(url, file, stream, part, on_bytes)
            if reason is None:
                os.fsync(stream.fileno())
                part.replace(path)
                return
            reasons.append(f"{urllib.parse.urlsplit(url).netloc}: {reason}")
        if not part.stat().st_size:
            part.unlink()
    raise _NotHad("; ".join(reasons))


def _try_mirror(url: str, file: File, stream: BinaryIO, part: Path, on_bytes: OnBytes) -> str | None:
    """Complete the part from one mirror; why it could not be done, or None."""
    reason = ""
    for _ in range(ATTEMPTS):
        before = part.stat().st_size
        try:
            if before < file.size:
                _append(url, file, stream, on_bytes)
        except (OSError, http.client.HTTPException, _Cut) as error:
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                raise
            reason = _words(error)
            if getattr(error, "code", None) == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                stream.truncate(0)  # what lay there is no beginning of this file
                continue
            if part.stat().st_size > before:
                continue  # it brought something: go on from there
            return reason
        if part.stat().st_size == file.size and _sha256(part) == file.sha256:
            return None
        reason = "another checksum than expected"
        stream.truncate(0)
        if not before:
            return reason  # all of it came from here; else what lay there may have been wrong
    return reason


def _append(url: str, file: File, stream: BinaryIO, on_bytes: OnBytes) -> None:
    """Ask for what is missing and write it as it comes."""
    have = os.fstat(stream.fileno()).st_size
    request = urllib.request.Request(url, headers={"User-Agent": f"paceline/{__version__}"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if have and not goes_on:  # a server that knows no ranges sends all of it
            stream.truncate(0)
            have = 0
        while have <= file.size and (chunk := response.read(CHUNK)):
            stream.write(chunk)
            stream.flush()
            have += len(chunk)
            on_bytes(have)
    if have < file.size:
        raise _Cut(f"the connection was cut after {have:,} of {file.size:,} bytes")


def _words(error: Exception) -> str:
    """An error of the network in a few words."""
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__


@contextlib.contextmanager
def _lock(stream: BinaryIO, part: Path) -> Iterator[None]:
    """Two processes must not write one part; the kernel lets go of the lock with the process."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{part} is being downloaded by another process; wait for it to end") from None
    except OSError:  # a file system without locks: the checksum still tells
        pass
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what has come is kept in {part}, and the same command goes on from there") from None


@contextlib.contextmanager
def _bar(file: File) -> Iterator[OnBytes]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(file.name, total=file.size)
        yield lambda size: bar.update(task, completed=size)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _unpacked_size(path: Path) -> int | None:
    """How much a .gz file holds; None if it is not there or damaged."""
    try:
        with gzip.open(path) as stream:
            return sum(len(chunk) for chunk in iter(lambda: stream.read(CHUNK), b""))
    except (OSError, EOFError, zlib.error):
        return None
