"""The files of a data set as tensors: MNIST's idx files and CIFAR-10's records, packed or not. Nothing is unpickled."""

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
from paceline.hub.catalog import Content, File, Known

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

SIDE = 28  # pixels of an idx image
RECORD = 1 + 3 * 32 * 32  # bytes of a CIFAR-10 record: the class, then red, green and blue pixels
CLASSES = 10


def read(name: str, train: bool = True, root: str | os.PathLike[str] | None = None) -> TensorDataset:
    """The training or test images of a data set as bytes, [N, channels, rows, columns], and their classes as int64.

    The files are looked for in `root`, by default in $PACELINE_HOME/datasets/NAME.
    """
    from torch.utils.data import TensorDataset

    place = _Place(catalog.find(name), Path(root) if root else catalog.folder_of(name))
    if place.known.layout == "text":
        raise ConfigError(f"{name} is no set of images; read {place.folder / place.known.files[0].name} as text")
    images, classes = (_read_idx if place.known.layout == "idx" else _read_cifar)(place, train)
    return TensorDataset(images, classes)


@dataclass(frozen=True)
class _Place:
    """A data set and the folder that it is read from; what is wrong there is told with what to do."""

    known: Known
    folder: Path

    def find(self, *names: str) -> Path:
        """The first of several files that is there."""
        for name in names:
            if (self.folder / name).is_file():
                return self.folder / name
        raise DataError(f"{(self.folder / names[0]).resolve()} does not exist; {self._command()}")

    def damaged(self, path: Path, what: str) -> DataError:
        return DataError(f"{path} {what}; remove that file, then {self._command()}")

    @contextmanager
    def unpacking(self, path: Path, file: File) -> Iterator[None]:
        """What gzip and tar say of a damaged file becomes an error that names it."""
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            size = path.stat().st_size
            raise self.damaged(
                path, f"is damaged: {error} ({size:,} bytes, the official file has {file.size:,})"
            ) from None

    def _command(self) -> str:
        is_default = self.folder.resolve() == catalog.folder_of(self.known.name).resolve()
        to = "" if is_default else f" --to {self.folder}"
        return f"run: paceline data get {self.known.name}{to} (or name another place: PACELINE_HOME, dataset_args.root)"


# --- idx: a header of big-endian numbers (the kind, then each dimension), then bytes ------------------------------


def _read_idx(place: _Place, train: bool) -> tuple[Tensor, Tensor]:
    of_images, of_classes = place.known.files[:2] if train else place.known.files[2:]
    _, images = _idx_values(place, of_images, (SIDE, SIDE))
    path, classes = _idx_values(place, of_classes, ())
    if len(images) != len(classes):
        raise place.damaged(path, f"has {len(classes):,} classes for {len(images):,} images")
    return images.unsqueeze(1), _checked(place, path, classes)


def _idx_values(place: _Place, file: File, sample: tuple[int, ...]) -> tuple[Path, Tensor]:
    """The file that was read, packed or not, and its values, [N, *sample]."""
    path = place.find(file.name, file.contents[0].path)
    with place.unpacking(path, file), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = stream.read()
    start = 4 * (2 + len(sample))
    kind, count, *dimensions = (int.from_bytes(content[at : at + 4], "big") for at in range(0, start, 4))
    if kind != 0x801 + len(sample) or tuple(dimensions) != sample:
        raise place.damaged(path, "does not begin as an idx file of this kind does")
    expected = start + count * math.prod(sample)
    if len(content) != expected:
        raise place.damaged(path, f"holds {len(content):,} bytes, not {expected:,}")
    return path, _tensor(content)[start:].reshape(count, *sample)


# --- CIFAR-10: files of equal records -----------------------------------------------------------------------------


def _read_cifar(place: _Place, train: bool) -> tuple[Tensor, Tensor]:
    import torch

    [archive] = place.known.files
    contents = archive.contents[:-1] if train else archive.contents[-1:]
    tables = []
    for content, (path, data) in zip(contents, _cifar_files(place, archive, contents), strict=True):
        if len(data) != content.size:
            raise place.damaged(path, f"holds {len(data):,} bytes, not {content.size:,}")
        tables.append(_tensor(data).reshape(-1, RECORD))
        _checked(place, path, tables[-1][:, 0])
    table = torch.cat(tables)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def _cifar_files(place: _Place, archive: File, contents: tuple[Content, ...]) -> list[tuple[Path, bytes]]:
    """Each file's path and bytes: from the archive's folder, from `root` itself, or from within the archive."""
    names = [content.path for content in contents]
    packed = place.folder / archive.name
    if packed.is_file() and not (place.folder / names[0]).parent.is_dir():
        found = _from_archive(place, packed, archive, names)
        return [(packed / name, found[name]) for name in names]
    paths = [place.find(name, Path(name).name) for name in names]
    return [(path, path.read_bytes()) for path in paths]


def _from_archive(place: _Place, path: Path, archive: File, names: list[str]) -> dict[str, bytes]:
    """Files of the archive by name. It is read once from its beginning, and nothing is written."""
    found = {}
    with place.unpacking(path, archive), tarfile.open(path, "r|gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name in names else None
            if stream is not None:
                found[member.name] = stream.read()
    missing = [name for name in names if name not in found]
    if missing:
        raise place.damaged(path, f"holds no {missing[0]}")
    return found


# --- both ---------------------------------------------------------------------------------------------------------


def _tensor(data: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, because bytes cannot be written to


def _checked(place: _Place, path: Path, classes: Tensor) -> Tensor:
    """Classes as int64. One that does not exist would show in the loss only, on a GPU without a word of where."""
    if len(classes) and int(classes.max()) >= CLASSES:
        raise place.damaged(path, f"has class {int(classes.max())}, but there are only 0 to {CLASSES - 1}")
    return classes.long()
