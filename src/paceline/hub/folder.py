"""The folder of a data set's files: finds the files, and creates the errors for missing and damaged files."""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError
from paceline.hub import catalog
from paceline.hub.catalog import KnownDataset, RemoteFile


@dataclass(frozen=True)
class DatasetFolder:
    """A data set and the folder that it is read from; errors name the file and the command that downloads it."""

    dataset: KnownDataset
    path: Path

    @classmethod
    def of(cls, name: str, root: str | os.PathLike[str] | None) -> DatasetFolder:
        """Return the folder of a data set: `root`, by default $PACELINE_HOME/datasets/NAME."""
        return cls(catalog.find(name), Path(root) if root else catalog.folder_of(name))

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
        """Turn errors of gzip, tar and zip into a DataError that names the file."""
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
            size = path.stat().st_size
            raise self.damaged(
                path, f"is damaged: {error} ({size:,} bytes; the official file has {file.size:,})"
            ) from None

    def _command(self) -> str:
        """Return the command that downloads the files."""
        is_default = self.path.resolve() == catalog.folder_of(self.dataset.name).resolve()
        command = f"paceline data get {self.dataset.name}" + ("" if is_default else f" --to {self.path}")
        return f"run: {command} (or set another folder: PACELINE_HOME, dataset_args.root)"
