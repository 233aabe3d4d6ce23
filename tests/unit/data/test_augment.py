"""Augmentation against a slow reference: plain integers for the hash, numpy for the geometry, one sample at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from paceline.config import Augmentation, build
from paceline.data.augment import Augment
from paceline.data.seeding import seed_for
from paceline.errors import ConfigError, DataError

COLOURS = {"mean": [0.5, 0.25, 0.4], "std": [0.2, 0.3, 0.25]}
EVERYTHING = {"normalize": COLOURS, "flip": "random", "translate": 3, "cutout": 4}
WORD = 1 << 64


def make(seed: int = 5, **section: Any) -> Augment:
    return Augment(Augmentation.model_validate(section), seed)


def bytes_of(samples: int, height: int = 9, width: int = 12, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (samples, channels, height, width), dtype=torch.uint8, generator=generator)


def train(augment: Augment, images: Tensor, indices: list[int] | range, epoch: int) -> Tensor:
    return augment.train(images, torch.tensor(list(indices)), torch.tensor(epoch))


# --- the reference --------------------------------------------------------------------------------------------------


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def slowly(section: dict[str, Any], image: np.ndarray, *, seed: int, index: int, epoch: int) -> np.ndarray:
    """What becomes of one image of bytes (C, H, W)."""
    own = seed_for(seed, "augment") + index * 0x9E3779B97F4A7C15
    per_sample, per_epoch = mix(own % WORD), mix((own + epoch * 0xD1342543DE82EF95) % WORD)
    flip, reach, size = section.get("flip"), section.get("translate", 0), section.get("cutout", 0)
    if (flip == "random" and per_epoch % 2) or (flip == "alternating" and (per_sample + epoch) % 2):
        image = image[:, :, ::-1]
    _, height, width = image.shape
    down, right, top, left = (
        ((per_epoch >> begin) % 2**15) * choices >> 15
        for begin, choices in (
            (1, 2 * reach + 1), (16, 2 * reach + 1), (31, height - size + 1), (46, width - size + 1)
        )
    )  # fmt: skip
    padded = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode="reflect")
    pixels = padded[:, down : down + height, right : right + width].astype(np.float32)
    units = np.float32(255)
    normalize = section.get("normalize", {"mean": [0], "std": [1]})
    mean, std = (np.array(normalize[key], np.float32)[:, None, None] * units for key in ("mean", "std"))
    pixels = (pixels - mean) / std
    if size:
        pixels[:, top : top + size, left : left + size] = 0
    return pixels


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"normalize": COLOURS},
        {"flip": "random"},
        {"flip": "alternating"},
        {"translate": 2},
        {"cutout": 5},
        {"flip": "alternating", "translate": 8, "cutout": 9},
        EVERYTHING,
    ],
    ids=lambda section: "+".join(section) or "nothing",
)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 1), (-(2**40), 1000)])
def test_augmentation_equals_the_slow_reference_to_the_last_bit(section: dict[str, Any], seed: int, epoch: int) -> None:
    indices = [*range(20), 10**6, 2**40]
    images = bytes_of(len(indices))
    out = train(make(seed, **section), images, indices, epoch)
    slow = [
        slowly(section, image.numpy(), seed=seed, index=index, epoch=epoch)
        for index, image in zip(indices, images, strict=True)
    ]
    assert out.dtype == torch.float32
    assert np.array_equal(out.numpy(), np.stack(slow))


# --- randomness -----------------------------------------------------------------------------------------------------


def test_alternating_flips_mirror_a_sample_in_every_other_epoch() -> None:
    images = bytes_of(200)
    epochs = [train(make(flip="alternating"), images, range(200), epoch) for epoch in range(4)]
    plain = images / 255
    is_mirrored = [(out == plain.flip(3)).flatten(1).all(1) for out in epochs]
    assert all(
        ((out == plain).flatten(1).all(1) ^ mirrored).all() for out, mirrored in zip(epochs, is_mirrored, strict=True)
    )
    assert torch.equal(is_mirrored[0], ~is_mirrored[1])
    assert torch.equal(is_mirrored[0], is_mirrored[2])
    assert torch.equal(is_mirrored[1], is_mirrored[3])
    assert 70 < int(is_mirrored[0].sum()) < 130  # decided independently for each sample


def test_random_flips_differ_between_epochs() -> None:
    images = bytes_of(400)
    first, second = (
        (train(make(flip="random"), images, range(400), epoch) == images / 255).flatten(1).all(1) for epoch in (0, 1)
    )
    assert 150 < int(first.sum()) < 250
    assert 150 < int((first ^ second).sum()) < 250


def test_translations_reach_every_offset_about_as_often() -> None:
    """An image whose pixels encode their position; its middle is never reflected."""
    size, reach, samples = 9, 2, 4000
    places = torch.arange(size * size, dtype=torch.float32).reshape(1, 1, size, size).expand(samples, 1, size, size)
    for epoch in (0, 1):
        middle = train(make(translate=reach), places, range(samples), epoch)[:, 0, size // 2, size // 2].int()
        found = Counter(middle.tolist())
        assert set(found) == {row * size + column for row in range(2, 7) for column in range(2, 7)}
        assert all(abs(count - samples / 25) < 5 * (samples / 25) ** 0.5 for count in found.values())


def test_cutouts_reach_every_place_about_as_often() -> None:
    out = train(make(cutout=4), torch.ones(4000, 1, 8, 8), range(4000), 0)
    tops = Counter((out == 0).flatten(2).int().argmax(2).flatten().tolist())
    assert set(tops) == {row * 8 + column for row in range(5) for column in range(5)}
    assert all(abs(count - 160) < 5 * 160**0.5 for count in tops.values())
    assert ((out == 0).sum((1, 2, 3)) == 16).all()


def test_seed_and_epoch_change_what_happens() -> None:
    images = bytes_of(20)
    one = train(make(1, **EVERYTHING), images, range(20), 0)
    assert not torch.equal(one, train(make(2, **EVERYTHING), images, range(20), 0))
    assert not torch.equal(one, train(make(1, **EVERYTHING), images, range(20), 1))


def test_a_sample_is_augmented_identically_alone_and_in_any_batch() -> None:
    images, augment = bytes_of(30), make(**EVERYTHING)
    together = train(augment, images, range(100, 130), 3)
    backwards = train(augment, images.flip(0), range(129, 99, -1), 3)
    alone = [train(augment, images[n : n + 1], [100 + n], 3) for n in range(30)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, backwards.flip(0))


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def test_evaluation_normalises_only() -> None:
    images = bytes_of(4)
    mean, std = (torch.tensor(COLOURS[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(make(**EVERYTHING).evaluate(images), (images / 255 - mean) / std)
    floats = images / 255
    torch.testing.assert_close(make(**EVERYTHING).evaluate(floats), (floats - mean) / std)
    assert torch.equal(make(flip="random").evaluate(images), floats)
    assert torch.equal(make(flip="random").evaluate(floats), floats)


def test_one_number_normalises_all_channels() -> None:
    out = make(normalize={"mean": [0.5], "std": [0.5]}).evaluate(bytes_of(2))
    torch.testing.assert_close(out, bytes_of(2) / 127.5 - 1)


def test_the_input_images_are_not_changed() -> None:
    images = torch.rand(4, 3, 9, 9)
    before = images.clone()
    train(make(cutout=4), images, range(4), 0)
    assert torch.equal(images, before)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_memory_format_is_kept(memory_format: torch.memory_format) -> None:
    images, augment = bytes_of(5).contiguous(memory_format=memory_format), make(**EVERYTHING)
    out = train(augment, images, range(5), 0)
    assert out.is_contiguous(memory_format=memory_format)
    assert augment.evaluate(images).is_contiguous(memory_format=memory_format)
    assert torch.equal(out, train(augment, bytes_of(5), range(5), 0))


def test_nothing_depends_on_the_data_on_the_host() -> None:
    """Fake tensors have no values: a shape or a branch that needs one would raise."""
    with FakeTensorMode():
        images = torch.zeros(6, 3, 9, 12, dtype=torch.uint8)
        out = make(**EVERYTHING).train(images, torch.zeros(6, dtype=torch.int64), torch.tensor(0))
        assert out.shape == images.shape


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "shape", "words"),
    [
        ({}, (8, 10), r"4 dimensions .* shape \(8, 10\)"),
        ({"normalize": COLOURS}, (2, 1, 8, 8), r"3 numbers in mean and in std, but images have 1 channels"),
        ({"translate": 8}, (2, 3, 8, 9), r"translate=8 is too large .* at most 7"),
        ({"cutout": 9}, (2, 3, 9, 8), r"cutout=9 is too large .* at most 8"),
    ],
)
def test_images_that_do_not_fit_are_refused(section: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        train(make(**section), torch.zeros(shape), range(shape[0]), 0)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"flip": "sometimes"}, "augment.flip='sometimes'"),
        ({"translate": -1}, "augment.translate=-1"),
        ({"shear": 1}, "augment.shear is not a known key"),
        ({"normalize": {"mean": [0.5], "std": [0]}}, "augment.normalize.std=0"),
        ({"normalize": {"mean": [0.5, 0.5], "std": [1]}}, "as many numbers in mean as in std"),
    ],
)
def test_mistakes_in_the_section_are_named(make_config: Any, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        make_config(augment=section)


def test_augmentation_belongs_to_the_managed_loop() -> None:
    def loop(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: Any) -> None: ...

    with pytest.raises(ConfigError, match="augment needs a train_fn with the parameter run, or the managed loop"):
        build({"model_fn": loop, "dataset_fn": loop, "train_fn": loop, "augment": {"flip": "random"}})


def test_the_section_is_written_as_it_was_given(make_config: Any) -> None:
    assert "flip: random" in make_config(augment=EVERYTHING).to_yaml()
