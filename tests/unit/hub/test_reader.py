"""hub/reader.py: MNIST's and CIFAR-10's files as tensors, and errors for damaged files."""

from __future__ import annotations

import gzip
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.errors import ConfigError, DataError
from paceline.hub import catalog

COUNTS = {"train": 5, "t10k": 3}
RECORDS = 2


def idx(values: np.ndarray) -> bytes:
    header = [0x800 + values.ndim, *values.shape]
    return b"".join(number.to_bytes(4, "big") for number in header) + values.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write four small idx files, the images compressed and the labels not; return their contents."""
    generator = np.random.default_rng(0)
    contents = {}
    for part, count in COUNTS.items():
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
        contents[part] = images, labels
    return contents


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_compressed_and_unpacked(name: str, mnist, tmp_path: Path) -> None:
    for part, is_training in (("train", True), ("t10k", False)):
        images, classes = paceline.datasets.read(name, train=is_training, root=tmp_path).tensors
        assert (images.dtype, classes.dtype) == (torch.uint8, torch.int64)
        assert images.shape == (COUNTS[part], 1, 28, 28)
        assert np.array_equal(images.squeeze(1).numpy(), mnist[part][0])
        assert classes.tolist() == mnist[part][1].tolist()


@pytest.mark.parametrize(("name", "nearest"), [("mnits", "mnist"), ("SST-22", "sst2"), ("Covtypes", "covtype")])
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a known data set; did you mean {nearest}"):
        paceline.datasets.read(name)


def test_a_missing_file_is_reported_with_the_command_that_downloads_it(mnist, tmp_path: Path) -> None:
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/train-labels.*gz does not exist; run: .* mnist --to {tmp_path} "):
        paceline.datasets.read("mnist", root=tmp_path)


def shorten(data: bytes) -> bytes:
    return data[:-1]


def change_middle(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("train-images-idx3-ubyte.gz", shorten, r"is damaged: .* \(.* bytes; the official file has 9,912,422\)"),
        ("train-images-idx3-ubyte.gz", change_middle, "is damaged: "),
        ("train-images-idx3-ubyte.gz", lambda data: b"<html>not found</html>", "is damaged: Not a gzipped file"),
        (
            "train-images-idx3-ubyte.gz",
            lambda data: gzip.compress(shorten(gzip.decompress(data))),
            "contains 3,935 .* 3,936",
        ),
        ("train-labels-idx1-ubyte", shorten, "contains 12 bytes, not 13"),
        ("train-labels-idx1-ubyte", lambda data: b"", "does not start with the header of an idx file"),
        ("train-labels-idx1-ubyte", lambda data: data[:7] + b"\4" + data[8:-1], "has 4 classes for 5 images"),
        ("train-labels-idx1-ubyte", lambda data: data[:-1] + b"\12", "contains class 10, but classes are 0 to 9"),
    ],
)
def test_a_damaged_idx_file_is_refused_by_name(name: str, damage, text: str, mnist, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{name} {text}.*; remove that file, then run: paceline data get mnist"):
        paceline.datasets.read("mnist", root=tmp_path)


# --- CIFAR-10; unpacked folders are read in test_cifar10_recipes.py ---------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, np.ndarray]:
    """Write a small archive with its files in reverse order; return its path and all records."""
    [official] = catalog.CIFAR10.files
    contents = tuple(replace(content, size=RECORDS * 3073) for content in official.contents)
    monkeypatch.setitem(catalog.ALL, "cifar10", replace(catalog.CIFAR10, files=(replace(official, contents=contents),)))
    records = np.random.default_rng(0).integers(0, 256, (6 * RECORDS, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    path = tmp_path / official.name
    with tarfile.open(path, "w:gz") as tar:
        for content, part in reversed(list(zip(contents, np.split(records, 6), strict=True))):
            entry = tarfile.TarInfo(content.path)
            entry.size = part.nbytes
            tar.addfile(entry, io.BytesIO(part.tobytes()))
    return path, records


def test_the_archive_is_read_without_being_unpacked(archive, tmp_path: Path) -> None:
    path, records = archive
    images, classes = paceline.datasets.read("cifar10", root=tmp_path).tensors
    test_images, test_classes = paceline.datasets.read("cifar10", train=False, root=tmp_path).tensors
    assert np.array_equal(torch.cat([images, test_images]).flatten(1).numpy(), records[:, 1:])
    assert torch.cat([classes, test_classes]).tolist() == records[:, 0].tolist()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_damaged_archive_is_refused_by_name(archive, tmp_path: Path, keep: float) -> None:
    path, _ = archive
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=f"{path.name} .*the official file has 170,052,171.*remove that file"):
        paceline.datasets.read("cifar10", root=tmp_path)


def test_an_archive_of_something_else_is_refused(archive, tmp_path: Path) -> None:
    path, _ = archive
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(
        DataError, match=r"cifar-10-binary.tar.gz does not contain cifar-10-batches-bin/data_batch_1.bin"
    ):
        paceline.datasets.read("cifar10", root=tmp_path)
