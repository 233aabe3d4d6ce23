"""Writes arrays as PNG files, without an image library."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by the number of channels: grey, RGB, RGBA
BORDER = 1  # pixels between the images of a grid


def pixels_of(images: npt.NDArray[np.generic]) -> Pixels:
    """Pixels (H, W, C) as bytes, from an image (C, H, W) or a batch of images as a grid; floats are between 0 and 1."""
    if images.ndim not in (3, 4) or images.shape[-3] not in COLOUR_TYPES:
        raise ValueError(f"has the shape {images.shape}; an image is (C, H, W) with 1, 3 or 4 channels, or a batch")
    if images.dtype != np.uint8:
        images = np.nan_to_num(np.clip(images.astype(np.float32), 0, 1) * 255).round().astype(np.uint8)
    batch = images.reshape(-1, *images.shape[-3:]).transpose(0, 2, 3, 1).astype(np.uint8)
    return batch[0] if len(batch) == 1 else _grid(batch)


def _grid(batch: Pixels) -> Pixels:
    """The images of a batch in a grid that is as square as possible."""
    number, height, width, channels = batch.shape
    columns = int(np.ceil(np.sqrt(number)))
    rows = -(-number // columns)
    grid = np.zeros((rows * (height + BORDER) - BORDER, columns * (width + BORDER) - BORDER, channels), np.uint8)
    for index, image in enumerate(batch):
        top, left = index // columns * (height + BORDER), index % columns * (width + BORDER)
        grid[top : top + height, left : left + width] = image
    return grid


def png_of(pixels: Pixels) -> bytes:
    """A PNG file with these pixels, an array of shape (H, W, C)."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def size_of_png(png: bytes) -> tuple[int, int, int]:
    """Height, width and channels of a PNG file that `png_of` made."""
    width, height, _, colour = struct.unpack(">IIBB", png[16:26])
    return height, width, next(channels for channels, kind in COLOUR_TYPES.items() if kind == colour)
