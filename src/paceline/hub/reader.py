"""Reads data sets as tensors: MNIST's idx files and CIFAR-10's records, compressed or not. Nothing is unpickled."""

from __future__ import annotations

import gzip
import math
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, DataError
from paceline.hub import catalog
from paceline.hub.catalog import KnownDataset, RemoteFile, UnpackedFile

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

SIDE = 28  # pixels of an idx image in each dimension
RECORD_BYTES = 1 + 3 * 32 * 32  # of CIFAR-10: the class, then red, green and blue pixels
CLASSES = 10


def read(name: str, train: bool = True, root: str | os.PathLike[str] | None = None) -> TensorDataset:
    """Return the training or test images as uint8, [N, channels, rows, columns], and their classes as int64.

    The files are in `root`, by default $PACELINE_HOME/datasets/NAME.
    """
    from torch.utils.data import TensorDataset

    source = _DatasetFolder(catalog.find(name), Path(root) if root else catalog.folder_of(name))
    if source.dataset.layout == "text":
        raise ConfigError(f"{name} is a text, not images; read {source.path / source.dataset.files[0].name} as text")
    images, classes = (_read_idx if source.dataset.layout == "idx" else _read_cifar)(source, train)
    return TensorDataset(images, classes)


@dataclass(frozen=True)
class _DatasetFolder:
    """A data set and the folder that it is read from; errors name the file and the command that downloads it."""

    dataset: KnownDataset
    path: Path

    def find(self, *names: str) -> Path:
        """Return the first of several files that exists."""
        for name in names:
            if (self.path / name).is_file():
                return self.path / name
        raise DataError(f"{(self.path / names[0]).resolve()} does not exist; {self._command()}")

    def damaged(self, path: Path, what: str) -> DataError:
        """Return the error for a damaged file."""
        return DataError(f"{path} {what}; remove that file, then {self._command()}")

    @contextmanager
    def unpacking(self, path: Path, file: RemoteFile) -> Iterator[None]:
        """Turn errors of gzip and tar into a DataError that names the file."""
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            size = path.stat().st_size
            raise self.damaged(
                path, f"is damaged: {error} ({size:,} bytes, the official file has {file.size:,})"
            ) from None

    def _command(self) -> str:
        """Return the command that downloads the files."""
        is_default = self.path.resolve() == catalog.folder_of(self.dataset.name).resolve()
        command = f"paceline data get {self.dataset.name}" + ("" if is_default else f" --to {self.path}")
        return f"run: {command} (or set another folder: PACELINE_HOME, dataset_args.root)"


# --- idx: a header of big-endian numbers (the type, then each dimension), then bytes ------------------------------


def _read_idx(source: _DatasetFolder, train: bool) -> tuple[Tensor, Tensor]:
    image_file, class_file = source.dataset.files[:2] if train else source.dataset.files[2:]
    _, images = _idx_values(source, image_file, (SIDE, SIDE))
    path, classes = _idx_values(source, class_file, ())
    if len(images) != len(classes):
        raise source.damaged(path, f"has {len(classes):,} classes for {len(images):,} images")
    return images.unsqueeze(1), _checked_classes(source, path, classes)


def _idx_values(source: _DatasetFolder, file: RemoteFile, sample: tuple[int, ...]) -> tuple[Path, Tensor]:
    """Return the path that was read, compressed or not, and its values, [N, *sample]."""
    path = source.find(file.name, file.contents[0].path)
    with source.unpacking(path, file), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = stream.read()
    start = 4 * (2 + len(sample))
    type_code, count, *dimensions = (int.from_bytes(content[at : at + 4], "big") for at in range(0, start, 4))
    if type_code != 0x801 + len(sample) or tuple(dimensions) != sample:
        raise source.damaged(path, "does not begin with the header of such an idx file")
    expected = start + count * math.prod(sample)
    if len(content) != expected:
        raise source.damaged(path, f"holds {len(content):,} bytes, not {expected:,}")
    return path, _tensor(content)[start:].reshape(count, *sample)


# --- CIFAR-10: files of equal records -----------------------------------------------------------------------------


def _read_cifar(source: _DatasetFolder, train: bool) -> tuple[Tensor, Tensor]:
    import torch

    [archive] = source.dataset.files
    contents = archive.contents[:-1] if train else archive.contents[-1:]
    tables = []
    for content, (path, data) in zip(contents, _cifar_files(source, archive, contents), strict=True):
        if len(data) != content.size:
            raise source.damaged(path, f"holds {len(data):,} bytes, not {content.size:,}")
        tables.append(_tensor(data).reshape(-1, RECORD_BYTES))
        _checked_classes(source, path, tables[-1][:, 0])
    table = torch.cat(tables)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def _cifar_files(
    source: _DatasetFolder, archive: RemoteFile, contents: tuple[UnpackedFile, ...]
) -> list[tuple[Path, bytes]]:
    """Return path and bytes of each file: from the unpacked archive's folder, from `root`, or from the archive."""
    names = [content.path for content in contents]
    archive_path = source.path / archive.name
    if archive_path.is_file() and not (source.path / names[0]).parent.is_dir():
        found = _from_archive(source, archive_path, archive, names)
        return [(archive_path / name, found[name]) for name in names]
    paths = [source.find(name, Path(name).name) for name in names]
    return [(path, path.read_bytes()) for path in paths]


def _from_archive(source: _DatasetFolder, path: Path, archive: RemoteFile, names: list[str]) -> dict[str, bytes]:
    """Return files of the archive by name. It is read once, and nothing is written to the disk."""
    found = {}
    with source.unpacking(path, archive), tarfile.open(path, "r|gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name in names else None
            if stream is not None:
                found[member.name] = stream.read()
    missing = [name for name in names if name not in found]
    if missing:
        raise source.damaged(path, f"holds no {missing[0]}")
    return found


# --- both ---------------------------------------------------------------------------------------------------------


def _tensor(data: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, because bytes are read-only


def _checked_classes(source: _DatasetFolder, path: Path, classes: Tensor) -> Tensor:
    """Return classes as int64 after a range check. Otherwise the loss would fail later, on a GPU without a location."""
    if len(classes) and int(classes.max()) >= CLASSES:
        raise source.damaged(path, f"has class {int(classes.max())}, but there are only 0 to {CLASSES - 1}")
    return classes.long()
