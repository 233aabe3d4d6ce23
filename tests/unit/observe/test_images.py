from __future__ import annotations

import io

import numpy as np
import pytest

from paceline.observe.images import pixels_of, png_of, size_of_png


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_holds_the_pixels(channels: int) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    png = png_of(pixels)
    assert size_of_png(png) == (5, 7, channels)
    assert np.array_equal(np.asarray(image.open(io.BytesIO(png))).reshape(pixels.shape), pixels)


def test_floats_are_between_0_and_1() -> None:
    image = np.array([[[-1.0, 0.0, 0.5, 1.0, 2.0, np.nan]]])
    assert pixels_of(image).ravel().tolist() == [0, 0, 128, 255, 255, 0]


def test_a_batch_is_a_grid() -> None:
    batch = np.arange(1, 4, dtype=np.uint8).reshape(3, 1, 1, 1)
    assert pixels_of(batch)[..., 0].tolist() == [[1, 0, 2], [0, 0, 0], [3, 0, 0]]


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 1, 1, 4, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"has the shape .* an image is \(C, H, W\)"):
        pixels_of(np.zeros(shape))
