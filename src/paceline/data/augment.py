"""Augmentation of image batches on the device: normalising, flips, translation, cutout.

The augmentation of a sample is a pure function of (seed, epoch, its index), an integer hash. So it needs no generator,
does not depend on lanes, ranks and batches, is the same on every device, and never synchronises with the host: a step
that augments can be captured in a CUDA graph once it has run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config import Augmentation
from paceline.data.seeding import seed_for
from paceline.errors import DataError

# SplitMix64: the step between states and the factors of its finaliser. The step between epochs is another odd number,
# so that an index and an epoch are never interchangeable.
INDEX_STEP, EPOCH_STEP = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
DOWN, RIGHT, TOP, LEFT = 1, 16, 31, 46  # the first bit of each draw in a word of 64 bits; bit 0 decides a random flip
BITS = 15  # of a draw


class Augment:
    """The augmentation of the config's section `augment`, for batches of images (N, C, H, W), floats or bytes."""

    def __init__(self, section: Augmentation, seed: int) -> None:
        self.section = section
        self.key = _signed(seed_for(seed, "augment"))
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}

    def train(self, images: Tensor, indices: Tensor, epoch: Tensor) -> Tensor:
        """The images of these samples, augmented for this epoch; `indices` (N) and `epoch` () are int64."""
        self._check(images)
        own = indices * _signed(INDEX_STEP) + self.key
        per_sample, per_epoch = _mix(torch.stack((own, own + epoch * _signed(EPOCH_STEP))))
        if self.section.flip != "none" or self.section.translate:
            images = self._moved(images, self._flips(per_sample, per_epoch, epoch), per_epoch)
        normalized = self._normalized(images)
        return self._cut(normalized, per_epoch) if self.section.cutout else normalized

    def evaluate(self, images: Tensor) -> Tensor:
        """The images for evaluation and prediction: only normalised."""
        self._check(images)
        return self._normalized(images)

    def _flips(self, per_sample: Tensor, per_epoch: Tensor, epoch: Tensor) -> Tensor:
        """1 where a sample is mirrored, 0 where it is not."""
        if self.section.flip == "alternating":
            return (per_sample + epoch) & 1
        return per_epoch & int(self.section.flip == "random")

    def _moved(self, images: Tensor, flips: Tensor, per_epoch: Tensor) -> Tensor:
        """The images flipped and translated in one gather, which reads each pixel from its source position."""
        reach, (_, _, height, width) = self.section.translate, images.shape
        samples = torch.arange(len(images), device=images.device)[:, None, None]
        rows = _sources(height, _draw(per_epoch, DOWN, 2 * reach + 1) - reach)
        columns = _sources(width, _draw(per_epoch, RIGHT, 2 * reach + 1) - reach)
        columns = torch.where(flips[:, None] == 1, width - 1 - columns, columns)
        moved = images[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return moved.contiguous(memory_format=_format_of(images))

    def _normalized(self, images: Tensor) -> Tensor:
        is_bytes = images.dtype == torch.uint8
        if self.section.normalize is None and not is_bytes:
            return images
        shift, scale = self._shift_and_scale(images.device, is_bytes)
        # No fused multiply-add and no division by a number on the host: their rounding differs between devices.
        return (images - shift) / scale

    def _shift_and_scale(self, device: torch.device, is_bytes: bool) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation in units of pixels; cached, as a captured step must not copy from the host."""
        if (device, is_bytes) not in self._constants:
            chosen = self.section.normalize
            units = 255.0 if is_bytes else 1.0
            mean, std = (chosen.mean, chosen.std) if chosen is not None else ([0.0], [1.0])
            both = torch.tensor([mean, std], device=device) * units
            self._constants[device, is_bytes] = both[0].reshape(1, -1, 1, 1), both[1].reshape(1, -1, 1, 1)
        return self._constants[device, is_bytes]

    def _cut(self, images: Tensor, per_epoch: Tensor) -> Tensor:
        """The images, each with a square of zeros at a random place."""
        size, (_, _, height, width) = self.section.cutout, images.shape
        rows = _within(height, _draw(per_epoch, TOP, height - size + 1), size)
        columns = _within(width, _draw(per_epoch, LEFT, width - size + 1), size)
        is_hole = rows[:, None, :, None] & columns[:, None, None, :]
        return torch.where(is_hole, images.new_zeros(()), images)  # masked_fill does not preserve channels_last

    def _check(self, images: Tensor) -> None:
        shape = tuple(images.shape)
        if images.dim() != 4:
            raise DataError(f"augment needs images of 4 dimensions (N, C, H, W), but a batch has the shape {shape}")
        normalize, channels, side = self.section.normalize, shape[1], min(shape[2:])
        if normalize is not None and len(normalize.mean) not in (1, channels):
            raise DataError(
                f"augment.normalize has {len(normalize.mean)} numbers in mean and in std, but images have {channels} "
                f"channels (shape {shape}); give one number, or one per channel"
            )
        for key, most in (("translate", side - 1), ("cutout", side)):
            if getattr(self.section, key) > most:
                raise DataError(
                    f"augment.{key}={getattr(self.section, key)} is too large for images of the shape {shape}; "
                    f"use at most {most}"
                )


def _sources(length: int, offsets: Tensor) -> Tensor:
    """The source positions of a line of pixels moved by each offset, reflected at both ends: (N, length)."""
    places = (torch.arange(length, device=offsets.device) + offsets[:, None]).abs()
    return (length - 1) - ((length - 1) - places).abs()


def _within(length: int, starts: Tensor, size: int) -> Tensor:
    """Whether each position of a line is among the `size` positions from each start: (N, length)."""
    places = torch.arange(length, device=starts.device) - starts[:, None]
    return (places >= 0) & (places < size)


def _draw(words: Tensor, begin: int, choices: int) -> Tensor:
    """A number in 0..choices−1 from the bits of each word, starting at bit `begin`."""
    return (((words >> begin) & ((1 << BITS) - 1)) * choices) >> BITS


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 in signed integers; overflow is intended."""
    x = (x ^ _shifted(x, 30)) * _signed(FACTORS[0])
    x = (x ^ _shifted(x, 27)) * _signed(FACTORS[1])
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """The unsigned right shift, which torch does not have: the copies of the sign bit are masked."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


def _format_of(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format
