"""The files of one run in a mirror, through fsspec: listed, written, verified, read and removed by name.

Credentials are never part of a URL; the library of the store takes them from its environment variables and files.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import ConfigError, MissingExtra
from paceline.formatting import redacted
from paceline.system.paths import is_file, is_url

CHUNK = 1 << 22
RECORD = "mirrored.json"  # which run a place belongs to, and which process writes it
EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "sftp": "paramiko"}  # the package that each extra installs
ALIASES = {"s3a": "s3", "gcs": "gs", "ssh": "sftp"}
RENAMING = ("file", "local", "sftp", "ssh")  # file systems, where a file is replaced atomically by a rename only

OnBytes = Callable[[int], None]  # called with the number of bytes that were transferred since the last call


class Mismatch(Exception):
    """A file in the mirror has another content than what was written to it."""


class MirrorPlace:
    """A folder in a mirror. Every method may raise any error of the store's library."""

    def __init__(self, url: str, *, is_new: bool = False) -> None:
        """Open the file system of a URL; with `is_new`, with a connection and credentials of its own."""
        self.url = url.rstrip("/")
        self._fs, root = file_system_of(self.url, is_new=is_new)
        self._root = root.rstrip("/")
        protocols = [self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._is_renaming = any(protocol in RENAMING for protocol in protocols)

    def sizes(self) -> dict[str, int]:
        """The size of each file, by its name relative to the place; empty if there is none."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(self._root) + 1 :]: int(facts["size"]) for path, facts in found.items()}

    def glob(self, pattern: str) -> list[str]:
        """The names of files that match a pattern."""
        self._fs.invalidate_cache()
        return [path[len(self._root) + 1 :] for path in self._fs.glob(f"{self._root}/{pattern}")]

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that does not exist yet; False if it exists. Of several writers, one succeeds."""
        self._make_folder_of(name)
        path = f"{self._root}/{name}"
        try:
            if self._is_renaming:
                with self._fs.open(path, "xb") as file:
                    file.write(content)
            else:
                self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        self.put(name, io.BytesIO(content), len(content))

    def put(self, name: str, source: IO[bytes], size: int, on_bytes: OnBytes = lambda count: None) -> str:
        """Write the first `size` bytes of a file, read them back and compare; return their SHA-256.

        Each byte is counted twice: when it is written and when it is read.
        """
        self._make_folder_of(name)
        target = f"{self._root}/{name}"
        partial = f"{target}.part" if self._is_renaming else target
        sent = self._send(partial, source, size, on_bytes)
        received = hashlib.sha256()
        for chunk in self._chunks(partial):
            received.update(chunk)
            on_bytes(len(chunk))
        if received.hexdigest() != sent:
            raise Mismatch(f"{name} differs from what was written to it")
        if partial != target:
            self._fs.mv(partial, target)
        return sent

    def get(self, name: str, path: Path, on_bytes: OnBytes) -> None:
        """Read a file into a local one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for chunk in self._chunks(f"{self._root}/{name}"):
                file.write(chunk)
                on_bytes(len(chunk))

    def remove(self, names: list[str]) -> None:
        """Remove files, in this order."""
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")
        if self._is_renaming:
            for folder in {name.rpartition("/")[0] for name in names} - {""}:
                with suppress(OSError):
                    self._fs.rmdir(f"{self._root}/{folder}")

    def _send(self, target: str, source: IO[bytes], size: int, on_bytes: OnBytes) -> str:
        """Write to the store without reading back; return the checksum of what was sent."""
        digest, left = hashlib.sha256(), size
        file = self._fs.open(target, "wb")
        try:
            while left and (chunk := source.read(min(CHUNK, left))):
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
                on_bytes(len(chunk))
        except BaseException:
            with suppress(Exception):  # an upload in parts is abandoned, not completed by `close`
                file.discard()
            raise
        file.close()
        return digest.hexdigest()

    def _chunks(self, path: str) -> Iterator[bytes]:
        self._fs.invalidate_cache()
        with self._fs.open(path, "rb", block_size=CHUNK) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def _make_folder_of(self, name: str) -> None:
        if self._is_renaming:  # an object store has no folders, and some libraries would create a bucket
            self._fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)


def is_mirrored(place: str) -> bool:
    """Whether a text names a run in a mirror: a URL, or a folder that a mirror has written."""
    return is_url(place) or is_file(Path(place) / RECORD)


def file_system_of(url: str, *, is_new: bool = False) -> tuple[Any, str]:
    """The file system of a URL and the path in it; a ConfigError if the package for it is missing."""
    scheme = url.partition("://")[0].lower() if is_url(url) else "file"
    extra = ALIASES.get(scheme, scheme)
    import fsspec  # takes a third of a second, which runs without a mirror do not need

    try:
        options = {"skip_instance_cache": True} if is_new and scheme != "file" else {}
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        if extra in EXTRAS:
            raise MissingExtra(EXTRAS[extra], extra, url) from None
        raise ConfigError(f"{url} needs another package: {reason_of(error)}") from None
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise
        raise ConfigError(f"{url} has an unknown protocol; use s3://, gs://, sftp:// or a folder") from None
    return fs, path


def reason_of(error: BaseException) -> str:
    """The first line of an error of a store, without credentials in URLs."""
    lines = str(error).splitlines() or [type(error).__name__]
    return redacted(lines[0])[:300]
