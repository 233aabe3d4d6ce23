"""Downloads the files of data sets: from several mirrors, with resumption, checksums and a progress bar.

A file is written as NAME.part and renamed when its checksum is correct, so a file under its name is complete.

Written by hand: pooch has neither mirrors nor resumption, and huggingface_hub, an optional extra, would save 35 lines.
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
from paceline.hub import catalog, copies
from paceline.hub.catalog import RemoteFile

TIMEOUT_S = 20.0
MAX_ATTEMPTS = 5  # at one mirror, if each attempt receives more bytes
CHUNK_BYTES = 1 << 18
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}

OnProgress = Callable[[int], None]  # called with the number of bytes that are in the file


def get(name: str, to: Path | None = None, log: Callable[[str], None] = print, source: str | None = None) -> Path:
    """Download or copy a data set's missing files to `to`, by default $PACELINE_HOME/datasets/NAME; return the folder.

    The files come from the known mirrors, or from `source`: a folder, or the URL of another mirror.
    """
    dataset = catalog.find(name)
    folder = to or catalog.folder_of(name)
    places = copies.places_in(source, dataset.name) if source is not None else dataset.mirrors
    missing = []
    for file in dataset.files:
        if is_present(folder, file):
            log(f"{file.name} already exists")
        else:
            missing.append(file)
    for number, file in enumerate(missing):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if source is not None and not copies.is_url(source):
                names = copies.take(places, file, folder)
            else:
                names = _download(places, file, folder, takes_contents=source is not None)
        except OSError as error:
            raise DataError(f"{folder.resolve()} cannot be written to: {error.strerror}; use --to DIR") from None
        except _AllMirrorsFailed as reasons:
            names = [file.name for file in missing[number:]]
            raise DataError(
                f"{file.name} could not be downloaded ({reasons}); put {', '.join(names)} into {folder.resolve()} by "
                "hand, or retry with a network connection or with --from FOLDER"
            ) from None
        log(f"{', '.join(names)} {'downloaded' if source is None else f'copied from {source}'}, checksum correct")
    return folder


def _download(places: Sequence[str], file: RemoteFile, folder: Path, *, takes_contents: bool) -> list[str]:
    """Download a file, or else its contents if that is allowed; return the names of the new files."""
    try:
        with _progress_bar(file) as on_progress:
            fetch([place + file.name for place in places], file, folder / file.name, on_progress)
    except _AllMirrorsFailed:
        if takes_contents and (names := copies.take_contents(places, file, folder)):
            return names
        raise
    return [file.name]


def is_present(folder: Path, file: RemoteFile) -> bool:
    """Whether a folder has a usable copy of a file, compressed or unpacked."""
    path = folder / file.name
    if all(any(_has_size(folder / form.path, form.size) for form in content.forms) for content in file.contents):
        return True
    if _has_size(path, file.size) and _sha256(path) == file.sha256:
        return True
    # Debian, for example, compresses the same content differently; gzip has its own checksum.
    return file.name == f"{file.contents[0].path}.gz" and _unpacked_size(path) == file.contents[0].size


class _AllMirrorsFailed(Exception):
    """No mirror provided the file; the text contains the reason for each mirror."""


class _Incomplete(Exception):
    """The connection was closed before the end of the file."""


def fetch(urls: Sequence[str], file: RemoteFile, path: Path, on_progress: OnProgress = lambda size: None) -> None:
    """Download one file to `path` from the first mirror that provides it completely."""
    part = path.with_name(f"{path.name}.part")
    reasons = []
    with part.open("ab") as stream, _lock(stream, part):
        for url in urls:
            reason = _try_mirror(url, file, stream, part, on_progress)
            if reason is None:
                os.fsync(stream.fileno())
                part.replace(path)
                return
            reasons.append(f"{urllib.parse.urlsplit(url).netloc}: {reason}")
        if not part.stat().st_size:
            part.unlink()
    raise _AllMirrorsFailed("; ".join(dict.fromkeys(reasons)))


def _try_mirror(url: str, file: RemoteFile, stream: BinaryIO, part: Path, on_progress: OnProgress) -> str | None:
    """Complete the partial file from one mirror; return None, or the reason of a failure."""
    reason = ""
    for _ in range(MAX_ATTEMPTS):
        before = part.stat().st_size
        try:
            if before < file.size:
                _append(url, file, stream, on_progress)
        except (OSError, http.client.HTTPException, _Incomplete) as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            reason = _reason_of(error)
            if getattr(error, "code", None) == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                stream.truncate(0)  # the partial file is not the beginning of this file
                continue
            if part.stat().st_size > before:
                continue  # resume after the new bytes
            return reason
        found = _sha256(part)
        if found == file.sha256:
            return None
        is_longer = part.stat().st_size > file.size
        reason = f"{'its beginning' if is_longer else 'it'} has the SHA-256 {found}, not {file.sha256}"
        stream.truncate(0)
        if not before:  # all bytes came from this mirror; otherwise the earlier bytes may be wrong
            return reason
    return reason


def _append(url: str, file: RemoteFile, stream: BinaryIO, on_progress: OnProgress) -> None:
    """Request the missing bytes and append them as they arrive."""
    size = os.fstat(stream.fileno()).st_size
    request = urllib.request.Request(url, headers={"User-Agent": f"paceline/{__version__}"})
    if size:
        request.add_header("Range", f"bytes={size}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        is_resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {size}-")
        if size and not is_resumed:  # a server without ranges sends the file from its beginning
            stream.truncate(0)
            size = 0
        while size <= file.size and (chunk := response.read(CHUNK_BYTES)):
            stream.write(chunk)
            stream.flush()
            size += len(chunk)
            on_progress(size)
    if size < file.size:
        raise _Incomplete(f"the connection was closed after {size:,} of {file.size:,} bytes")


def _reason_of(error: Exception) -> str:
    """Return the cause of a network error in a few words."""
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__


@contextlib.contextmanager
def _lock(stream: BinaryIO, part: Path) -> Iterator[None]:
    """Lock the partial file against other processes. The kernel releases the lock when this process ends."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{part} is being downloaded by another process; wait until it has finished") from None
    except OSError:  # a file system without locks: the checksum would show two writers
        pass
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the download so far is in {part}; run the same command to resume it") from None


@contextlib.contextmanager
def _progress_bar(file: RemoteFile) -> Iterator[OnProgress]:
    """Show a progress bar if stderr is a terminal."""
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
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _unpacked_size(path: Path) -> int | None:
    """Return the number of bytes in a .gz file when unpacked; None if it is missing or damaged."""
    try:
        with gzip.open(path) as stream:
            return sum(len(chunk) for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""))
    except (OSError, EOFError, zlib.error):
        return None
