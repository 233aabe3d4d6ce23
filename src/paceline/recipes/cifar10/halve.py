"""max_pool2d(x, 2) for channels-last images: torch's own takes as long as the convolutions around it.

Forward reads the image once and stores which pixel of four was the largest; backward writes the gradient once. Written
in Triton, which is installed with torch for NVIDIA GPUs.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def forward_kernel(x, best, which, total, height, width, C: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    column = (i // C) % (width // 2)
    row = (i // C) // (width // 2)  # over all images
    image, row = row // (height // 2), row % (height // 2)
    corner = x + ((image * height + 2 * row) * width + 2 * column) * C + i % C
    a = tl.load(corner, mask=inside)
    b = tl.load(corner + C, mask=inside)
    c = tl.load(corner + width * C, mask=inside)
    d = tl.load(corner + width * C + C, mask=inside)
    upper, lower = tl.maximum(a, b), tl.maximum(c, d)
    place = tl.where(upper >= lower, tl.where(a >= b, 0, 1), tl.where(c >= d, 2, 3))
    tl.store(best + i, tl.maximum(upper, lower), mask=inside)
    tl.store(which + i, place.to(tl.uint8), mask=inside)


@triton.jit
def backward_kernel(slope, which, out, total, height, width, C: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    # Cells of four pixels cover the whole image; an odd last row or column is not pooled, so its gradient is zero.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns, rows = (width + 1) // 2, (height + 1) // 2
    column = (i // C) % columns
    row = (i // C) // columns
    image, row = row // rows, row % rows
    inside = i < total
    is_whole = inside & (column < width // 2) & (row < height // 2)
    cell = ((image * (height // 2) + row) * (width // 2) + column) * C + i % C
    value = tl.load(slope + cell, mask=is_whole, other=0.0)
    place = tl.load(which + cell, mask=is_whole, other=0)
    zero = tl.zeros_like(value)
    corner = out + ((image * height + 2 * row) * width + 2 * column) * C + i % C
    has_right, has_lower = inside & (2 * column + 1 < width), inside & (2 * row + 1 < height)
    tl.store(corner, tl.where(place == 0, value, zero), mask=inside)
    tl.store(corner + C, tl.where(place == 1, value, zero), mask=has_right)
    tl.store(corner + width * C, tl.where(place == 2, value, zero), mask=has_lower)
    tl.store(corner + width * C + C, tl.where(place == 3, value, zero), mask=has_right & has_lower)


class Halve(torch.autograd.Function):
    """The maximum of every 2 × 2 pixels."""

    @staticmethod
    def forward(ctx, x):
        samples, channels, height, width = ctx.shape = x.shape
        x = x.contiguous(memory_format=torch.channels_last)
        best = torch.empty(
            (samples, channels, height // 2, width // 2),
            dtype=x.dtype, device=x.device, memory_format=torch.channels_last,
        )  # fmt: skip
        which = torch.empty_like(best, dtype=torch.uint8)
        grid = (triton.cdiv(best.numel(), BLOCK),)
        forward_kernel[grid](x, best, which, best.numel(), height, width, C=channels, BLOCK=BLOCK)
        ctx.save_for_backward(which)
        return best

    @staticmethod
    def backward(ctx, slope):
        (which,) = ctx.saved_tensors
        samples, channels, height, width = ctx.shape
        slope = slope.contiguous(memory_format=torch.channels_last)
        out = torch.empty(ctx.shape, dtype=slope.dtype, device=slope.device, memory_format=torch.channels_last)
        cells = samples * ((height + 1) // 2) * ((width + 1) // 2) * channels
        grid = (triton.cdiv(cells, BLOCK),)
        backward_kernel[grid](slope, which, out, cells, height, width, C=channels, BLOCK=BLOCK)
        return out
