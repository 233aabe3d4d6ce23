"""The known data sets: their files with sizes and checksums, their mirrors, and the folders in which they are stored.

No other module names a host. A downloaded file is used only if its checksum is correct.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError
from paceline.system.home import in_home


@dataclass(frozen=True)
class UnpackedFile:
    """A file inside a compressed one; readers also accept it unpacked, or as .gz."""

    path: str
    size: int
    sha256: str = ""  # empty if it is unknown: `--from` then accepts only the compressed file
    others: tuple[UnpackedFile, ...] = ()  # files of other tools with the same samples, used in place of this file

    @property
    def forms(self) -> tuple[UnpackedFile, ...]:
        """This file, and the files that can replace it."""
        return (self, *self.others)


@dataclass(frozen=True)
class RemoteFile:
    """A file that is downloaded, and the files inside it that are read."""

    name: str
    size: int
    sha256: str
    contents: tuple[UnpackedFile, ...]


@dataclass(frozen=True)
class KnownDataset:
    """A data set: its files, and the base URLs of its mirrors in the order of preference."""

    name: str
    layout: Literal["idx", "cifar", "text", "covtype", "sst2"]
    files: tuple[RemoteFile, ...]
    mirrors: tuple[str, ...]


def _idx(sizes_and_sha256: Sequence[tuple[int, str]]) -> tuple[RemoteFile, ...]:
    """Return the four files of MNIST, or of a data set in the same format."""
    contents = (
        UnpackedFile("train-images-idx3-ubyte", 16 + 60_000 * 28 * 28),
        UnpackedFile("train-labels-idx1-ubyte", 8 + 60_000),
        UnpackedFile("t10k-images-idx3-ubyte", 16 + 10_000 * 28 * 28),
        UnpackedFile("t10k-labels-idx1-ubyte", 8 + 10_000),
    )
    return tuple(
        RemoteFile(f"{content.path}.gz", size, sha256, (content,))
        for content, (size, sha256) in zip(contents, sizes_and_sha256, strict=True)
    )


MNIST = KnownDataset(
    name="mnist",
    layout="idx",
    files=_idx(
        [
            (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ]
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST = KnownDataset(
    name="fashion-mnist",
    layout="idx",
    files=_idx(
        [
            (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ]
    ),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
)

CIFAR10 = KnownDataset(
    name="cifar10",
    layout="cifar",
    files=(
        RemoteFile(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            tuple(
                UnpackedFile(f"cifar-10-batches-bin/{name}.bin", 10_000 * (1 + 3 * 32 * 32))
                for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
            ),
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
)

TINY_SHAKESPEARE = KnownDataset(
    name="tinyshakespeare",
    layout="text",
    files=(
        RemoteFile(
            "input.txt",
            1_115_394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            (UnpackedFile("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
        ),
    ),
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)

# J. A. Blackard, 1998. The file of the UCI repository has no header; many copies of it do.
COVTYPE = KnownDataset(
    name="covtype",
    layout="covtype",
    files=(
        RemoteFile(
            "covtype.data.gz",
            11_240_707,
            "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
            (
                UnpackedFile(
                    "covtype.data",
                    75_169_317,
                    "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
                    (
                        UnpackedFile(
                            "covtype.csv",
                            75_170_064,
                            "ea35ca6820fcbe0bdc6707e9ed31e11a9de84f07d88da73b511c737383c271a6",
                        ),
                    ),
                ),
            ),
        ),
    ),
    mirrors=("https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/",),
)

# R. Socher et al., 2013, as in GLUE. Many copies were written by a program that parses tables: the sentence
# `10,000 ` has become `10000` there, and four other sentences that are numbers have lost the space at their end.
SST2 = KnownDataset(
    name="sst2",
    layout="sst2",
    files=(
        RemoteFile(
            "SST-2.zip",
            7_439_277,
            "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
            (
                UnpackedFile(
                    "train.tsv",
                    3_806_081,
                    "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
                    (
                        UnpackedFile(
                            "train.tsv",
                            3_806_075,
                            "5c47819a1d04cfabc7afcc79a919c97b0b367101ad42d3ff148d67bf501384c2",
                        ),
                    ),
                ),
                UnpackedFile("dev.tsv", 94_931, "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0"),
            ),
        ),
    ),
    mirrors=("https://dl.fbaipublicfiles.com/glue/data/",),
)

ALL = {dataset.name: dataset for dataset in (MNIST, FASHION_MNIST, CIFAR10, TINY_SHAKESPEARE, COVTYPE, SST2)}
OTHER_NAMES = {"covertype": "covtype", "sst-2": "sst2", "cifar-10": "cifar10", "fashionmnist": "fashion-mnist"}


def canonical(name: str) -> str:
    """The name of a data set here, from a name that is also in use, such as Covertype or SST-2."""
    return OTHER_NAMES.get(name.lower(), name.lower())


def find(name: str) -> KnownDataset:
    """Return the data set with this name; raise a ConfigError with the nearest name if there is none."""
    if (known := canonical(name)) in ALL:
        return ALL[known]
    near = difflib.get_close_matches(name.lower(), ALL, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ALL)}"
    raise ConfigError(f"{name} is not a known data set; {hint}")


def folder_of(name: str) -> Path:
    """The default folder of a data set's files."""
    return in_home("datasets", canonical(name))
