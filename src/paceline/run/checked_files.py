"""Files with a checksum: written, flushed to the disk, and read back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """The name, size and checksum of a file that has been written."""

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]  # in the folder of its manifest, never outside
    size: Annotated[int, Field(ge=0)]
    sha256: str


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file, flush it to the disk and read it back; raises OSError if the content differs."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if sha256_of_file(path) != digest.hexdigest():
        raise OSError(f"{path} differs from the data written to it; check the disk")
    return FileRecord(path.name, size, digest.hexdigest())


def sha256_of_file(path: Path) -> str:
    """The checksum of a file's content."""
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            digest.update(view[:length])
    return digest.hexdigest()
