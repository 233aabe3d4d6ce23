"""What is known of each data set: its files, sizes and checksums, where they are had from, and where they are kept.

This is the only place that names hosts. Whatever comes from them is used only if its checksum is right.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError
from paceline.home import in_home


@dataclass(frozen=True)
class Content:
    """A file inside of a compressed one; readers take it unpacked, too."""

    path: str
    size: int


@dataclass(frozen=True)
class File:
    """A file as it is downloaded. `checksum` is "sha256:…" or "md5:…", whichever its publisher or its copies give."""

    name: str
    size: int
    checksum: str
    contents: tuple[Content, ...]


@dataclass(frozen=True)
class Known:
    """A data set: its files, and the addresses that they can be had from, the best first."""

    name: str
    layout: Literal["idx", "cifar", "text"]
    files: tuple[File, ...]
    mirrors: tuple[str, ...]


def _idx(sizes_and_checksums: Sequence[tuple[int, str]]) -> tuple[File, ...]:
    """The four files of MNIST and of those made in its likeness."""
    contents = (
        Content("train-images-idx3-ubyte", 16 + 60_000 * 28 * 28),
        Content("train-labels-idx1-ubyte", 8 + 60_000),
        Content("t10k-images-idx3-ubyte", 16 + 10_000 * 28 * 28),
        Content("t10k-labels-idx1-ubyte", 8 + 10_000),
    )
    return tuple(
        File(f"{content.path}.gz", size, checksum, (content,))
        for content, (size, checksum) in zip(contents, sizes_and_checksums, strict=True)
    )


MNIST = Known(
    name="mnist",
    layout="idx",
    files=_idx(
        [
            (9_912_422, "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ]
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",  # where it comes from; often refuses
    ),
)

FASHION_MNIST = Known(
    name="fashion-mnist",
    layout="idx",
    files=_idx(
        [
            (26_421_880, "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            (29_515, "md5:25c81989df183df01b3e8a0aad5dffbe"),
            (4_422_102, "md5:bef4ecab320f06d8554ea6380940ec79"),
            (5_148, "md5:bb300cfdad3c16e7a12a480ee83cd310"),
        ]
    ),
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

CIFAR10 = Known(
    name="cifar10",
    layout="cifar",
    files=(
        File(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            tuple(
                Content(f"cifar-10-batches-bin/{name}.bin", 10_000 * (1 + 3 * 32 * 32))
                for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
            ),
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
)

TINY_SHAKESPEARE = Known(
    name="tinyshakespeare",
    layout="text",
    files=(
        File(
            "input.txt",
            1_115_394,
            "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            (Content("input.txt", 1_115_394),),
        ),
    ),
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)

ALL = {known.name: known for known in (MNIST, FASHION_MNIST, CIFAR10, TINY_SHAKESPEARE)}


def find(name: str) -> Known:
    """The data set of that name."""
    if name in ALL:
        return ALL[name]
    near = difflib.get_close_matches(name, ALL, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ALL)}"
    raise ConfigError(f"{name} is not a known data set; {hint}")


def folder_of(name: str) -> Path:
    """Where a data set's files are kept unless another place is named."""
    return in_home("datasets", name)
