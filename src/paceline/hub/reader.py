"""Reads data sets by name: MNIST's idx files, CIFAR-10's records, and tables. Nothing is unpickled."""

from __future__ import annotations

import gzip
import math
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from paceline.errors import ConfigError
from paceline.hub import tables
from paceline.hub.catalog import RemoteFile, UnpackedFile
from paceline.hub.folder import DatasetFolder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

SIDE = 28  # pixels of an idx image in each dimension
RECORD_BYTES = 1 + 3 * 32 * 32  # of CIFAR-10: the class, then red, green and blue pixels
CLASSES = 10


@overload
def read(  # type: ignore[overload-overlap]
    name: Literal["sst2"], train: bool = True, root: str | os.PathLike[str] | None = None
) -> Texts: ...
@overload
def read(name: str, train: bool = True, root: str | os.PathLike[str] | None = None) -> TensorDataset: ...
def read(name: str, train: bool = True, root: str | os.PathLike[str] | None = None) -> TensorDataset | Texts:
    """Return the training or test samples of a data set and their classes as int64, from 0.

    Images are uint8, [N, channels, rows, columns]; the columns of covtype are float32, [N, 54]; sst2 has pairs of a
    sentence and a class. The files are in `root`, by default $PACELINE_HOME/datasets/NAME.
    """
    import torch
    from torch.utils.data import TensorDataset

    source = DatasetFolder.of(name, root)
    layout = source.dataset.layout
    if layout == "text":
        raise ConfigError(f"{name} is a single text; read it from {source.path / source.dataset.files[0].name}")
    if layout in ("idx", "cifar"):
        return TensorDataset(*(_read_idx if layout == "idx" else _read_cifar)(source, train))
    rows = tables.table(name, train, root)
    if layout == "sst2":
        return Texts(list(rows["sentence"]), torch.tensor(rows["label"].to_numpy("int64")))
    columns = torch.tensor(rows[list(tables.FEATURES)].to_numpy("float32"))
    return TensorDataset(columns, torch.tensor(rows[tables.TARGET].to_numpy("int64")) - 1)


@dataclass(frozen=True)
class Texts:
    """A map-style data set of texts with their classes."""

    texts: list[str]
    classes: Tensor  # int64, [N]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, Tensor]:
        return self.texts[index], self.classes[index]


# --- idx: a header of big-endian numbers (the type, then each dimension), then bytes ------------------------------


def _read_idx(source: DatasetFolder, train: bool) -> tuple[Tensor, Tensor]:
    image_file, class_file = source.dataset.files[:2] if train else source.dataset.files[2:]
    _, images = _idx_values(source, image_file, (SIDE, SIDE))
    path, classes = _idx_values(source, class_file, ())
    if len(images) != len(classes):
        raise source.damaged(path, f"has {len(classes):,} classes for {len(images):,} images")
    return images.unsqueeze(1), _checked_classes(source, path, classes)


def _idx_values(source: DatasetFolder, file: RemoteFile, sample: tuple[int, ...]) -> tuple[Path, Tensor]:
    """Return the path that was read, compressed or not, and its values, [N, *sample]."""
    path = source.find(file.name, file.contents[0].path)
    with source.unpacking(path, file), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = stream.read()
    start = 4 * (2 + len(sample))
    type_code, count, *dimensions = (int.from_bytes(content[at : at + 4], "big") for at in range(0, start, 4))
    if type_code != 0x801 + len(sample) or tuple(dimensions) != sample:
        raise source.damaged(path, "does not start with the header of an idx file of this kind")
    expected = start + count * math.prod(sample)
    if len(content) != expected:
        raise source.damaged(path, f"contains {len(content):,} bytes, not {expected:,}")
    return path, _tensor(content)[start:].reshape(count, *sample)


# --- CIFAR-10: files of equal records -----------------------------------------------------------------------------


def _read_cifar(source: DatasetFolder, train: bool) -> tuple[Tensor, Tensor]:
    import torch

    [archive] = source.dataset.files
    contents = archive.contents[:-1] if train else archive.contents[-1:]
    tables = []
    for content, (path, data) in zip(contents, _cifar_files(source, archive, contents), strict=True):
        if len(data) != content.size:
            raise source.damaged(path, f"contains {len(data):,} bytes, not {content.size:,}")
        tables.append(_tensor(data).reshape(-1, RECORD_BYTES))
        _checked_classes(source, path, tables[-1][:, 0])
    table = torch.cat(tables)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def _cifar_files(
    source: DatasetFolder, archive: RemoteFile, contents: tuple[UnpackedFile, ...]
) -> list[tuple[Path, bytes]]:
    """Return path and bytes of each file: from the unpacked archive's folder, from `root`, or from the archive."""
    names = [content.path for content in contents]
    archive_path = source.path / archive.name
    if archive_path.is_file() and not (source.path / names[0]).parent.is_dir():
        found = _from_archive(source, archive_path, archive, names)
        return [(archive_path / name, found[name]) for name in names]
    paths = [source.find(name, Path(name).name) for name in names]
    return [(path, path.read_bytes()) for path in paths]


def _from_archive(source: DatasetFolder, path: Path, archive: RemoteFile, names: list[str]) -> dict[str, bytes]:
    """Return files of the archive by name. It is read once, and nothing is written to the disk."""
    found = {}
    with source.unpacking(path, archive), tarfile.open(path, "r|gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name in names else None
            if stream is not None:
                found[member.name] = stream.read()
    missing = [name for name in names if name not in found]
    if missing:
        raise source.damaged(path, f"does not contain {missing[0]}")
    return found


# --- both ---------------------------------------------------------------------------------------------------------


def _tensor(data: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, because bytes are read-only


def _checked_classes(source: DatasetFolder, path: Path, classes: Tensor) -> Tensor:
    """Return classes as int64 after a range check. Otherwise the loss would fail later, on a GPU without a location."""
    if len(classes) and int(classes.max()) >= CLASSES:
        raise source.damaged(path, f"contains class {int(classes.max())}, but classes are 0 to {CLASSES - 1}")
    return classes.long()
