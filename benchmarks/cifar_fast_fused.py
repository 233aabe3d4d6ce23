# ruff: noqa: N803 - sizes known at compile time are written in capitals
"""Pooling, BatchNorm and GELU in few passes over memory, for channels_last tensors on a GPU (Triton).

`pool_norm_gelu(x, norm, pool)` is F.gelu(norm(F.max_pool2d(x, 2)), approximate="tanh"), or without the pooling, in
training: statistics of the batch, and the running ones follow. No atomics, so it repeats to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS = 512  # about four for each multiprocessor; each walks over many blocks of rows


@triton.jit
def _gelu(z):
    return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def _gelu_slope(z):
    s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return s + z * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z)


@triton.jit
def _pooled(x_ptr, row, column, valid, height, width, C: tl.constexpr):
    """The largest of four neighbours, and which one it is; `row` counts pixels of the small image over the batch."""
    small_w, small_h = width // 2, height // 2
    n, rest = row // (small_h * small_w), row % (small_h * small_w)
    y, x = rest // small_w, rest % small_w
    corner = (((n * height + 2 * y) * width + 2 * x) * C)[:, None] + column[None, :]
    a = tl.load(x_ptr + corner, mask=valid, other=0.0)
    b = tl.load(x_ptr + corner + C, mask=valid, other=0.0)
    c = tl.load(x_ptr + corner + width * C, mask=valid, other=0.0)
    d = tl.load(x_ptr + corner + width * C + C, mask=valid, other=0.0)
    first, second = tl.maximum(a, b), tl.maximum(c, d)
    best = tl.maximum(first, second)
    which = tl.where(first >= second, tl.where(a >= b, 0, 1), tl.where(c >= d, 2, 3))
    return best, which


@triton.jit
def _forward_sums(
    x_ptr, p_ptr, which_ptr, sums_ptr, rows, height, width, POOL: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, CP)
    total, squares = tl.zeros([CP], tl.float32), tl.zeros([CP], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)
        valid = (row < rows)[:, None] & (column < C)[None, :]
        place = row[:, None] * C + column[None, :]
        if POOL:
            value, which = _pooled(x_ptr, row, column, valid, height, width, C)
            tl.store(p_ptr + place, value, mask=valid)
            tl.store(which_ptr + place, which.to(tl.uint8), mask=valid)
        else:
            value = tl.load(x_ptr + place, mask=valid, other=0.0)
        value = value.to(tl.float32)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    at = sums_ptr + tl.program_id(0) * 2 * CP + column
    tl.store(at, total)
    tl.store(at + CP, squares)


@triton.jit
def _settle(
    sums_ptr, facts_ptr, mean_ptr, var_ptr, rows, eps, momentum, programs, FORWARD: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the programs' sums. Forward: mean and 1/spread, and the running ones. Backward: the two sums."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.arange(0, PROGRAMS)
    at = sums_ptr + program[:, None] * 2 * CP + column[None, :]
    valid = (program < programs)[:, None] & (column < CP)[None, :]
    first = tl.sum(tl.load(at, mask=valid, other=0.0), 0)
    second = tl.sum(tl.load(at + CP, mask=valid, other=0.0), 0)
    inside = column < C
    if FORWARD:
        mean = first / rows
        var = tl.maximum(second / rows - mean * mean, 0.0)
        tl.store(facts_ptr + column, mean, mask=inside)
        tl.store(facts_ptr + C + column, 1 / tl.sqrt(var + eps), mask=inside)
        old_mean = tl.load(mean_ptr + column, mask=inside, other=0.0)
        old_var = tl.load(var_ptr + column, mask=inside, other=0.0)
        tl.store(mean_ptr + column, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(var_ptr + column, old_var + momentum * (var * rows / (rows - 1) - old_var), mask=inside)
    else:
        tl.store(facts_ptr + column, first, mask=inside)
        tl.store(facts_ptr + C + column, second, mask=inside)


@triton.jit
def _forward_apply(p_ptr, facts_ptr, bias_ptr, y_ptr, rows, C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, CP)
    inside = column < C
    mean = tl.load(facts_ptr + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(facts_ptr + C + column, mask=inside, other=0.0)[None, :]
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * C + column[None, :]
    value = tl.load(p_ptr + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, _gelu((value - mean) * scale + bias).to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _backward_sums(
    dy_ptr, p_ptr, facts_ptr, bias_ptr, sums_ptr, rows, C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, CP)
    inside = column < C
    mean = tl.load(facts_ptr + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(facts_ptr + C + column, mask=inside, other=0.0)[None, :]
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    total, product = tl.zeros([CP], tl.float32), tl.zeros([CP], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)
        valid = (row < rows)[:, None] & inside[None, :]
        place = row[:, None] * C + column[None, :]
        white = (tl.load(p_ptr + place, mask=valid, other=0.0).to(tl.float32) - mean) * scale
        dz = tl.load(dy_ptr + place, mask=valid, other=0.0).to(tl.float32) * _gelu_slope(white + bias)
        total += tl.sum(dz, 0)
        product += tl.sum(dz * white, 0)
    at = sums_ptr + tl.program_id(0) * 2 * CP + column
    tl.store(at, total)
    tl.store(at + CP, product)


@triton.jit
def _backward_apply(
    dy_ptr, p_ptr, which_ptr, facts_ptr, bias_ptr, back_ptr, dx_ptr, rows, height, width, POOL: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, CP)
    inside = column < C
    mean = tl.load(facts_ptr + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(facts_ptr + C + column, mask=inside, other=0.0)[None, :]
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    total = tl.load(back_ptr + column, mask=inside, other=0.0)[None, :] / rows
    product = tl.load(back_ptr + C + column, mask=inside, other=0.0)[None, :] / rows
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * C + column[None, :]
    white = (tl.load(p_ptr + place, mask=valid, other=0.0).to(tl.float32) - mean) * scale
    dz = tl.load(dy_ptr + place, mask=valid, other=0.0).to(tl.float32) * _gelu_slope(white + bias)
    dp = ((dz - total - white * product) * scale).to(dx_ptr.dtype.element_ty)
    if POOL:
        which = tl.load(which_ptr + place, mask=valid, other=0)
        small_w, small_h = width // 2, height // 2
        n, rest = row // (small_h * small_w), row % (small_h * small_w)
        y, x = rest // small_w, rest % small_w
        corner = (((n * height + 2 * y) * width + 2 * x) * C)[:, None] + column[None, :]
        zero = tl.zeros_like(dp)
        tl.store(dx_ptr + corner, tl.where(which == 0, dp, zero), mask=valid)
        tl.store(dx_ptr + corner + C, tl.where(which == 1, dp, zero), mask=valid)
        tl.store(dx_ptr + corner + width * C, tl.where(which == 2, dp, zero), mask=valid)
        tl.store(dx_ptr + corner + width * C + C, tl.where(which == 3, dp, zero), mask=valid)
    else:
        tl.store(dx_ptr + place, dp, mask=valid)


class _PoolNormGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, norm: Any, pool: bool
    ) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        samples, channels, height, width = x.shape
        small = (samples, channels, height // 2, width // 2) if pool else tuple(x.shape)
        rows, padded = small[0] * small[2] * small[3], triton.next_power_of_2(channels)
        block = max(1, 4096 // padded)
        programs = min(PROGRAMS, triton.cdiv(rows, block))
        options = {"device": x.device, "memory_format": torch.channels_last}
        p = torch.empty(small, dtype=x.dtype, **options) if pool else x
        which = torch.empty(small, dtype=torch.uint8, **options) if pool else x
        y = torch.empty(small, dtype=x.dtype, **options)
        sums = torch.empty(programs, 2, padded, device=x.device)
        facts = torch.empty(2, channels, device=x.device)
        sizes = {"C": channels, "CP": padded, "BLOCK": block}
        _forward_sums[(programs,)](x, p, which, sums, rows, height, width, POOL=pool, **sizes)
        _settle[(triton.cdiv(channels, 16),)](
            sums, facts, mean, var, rows, norm.eps, norm.momentum, programs, FORWARD=True, C=channels, CP=padded,
            PROGRAMS=PROGRAMS, BLOCK=16,
        )  # fmt: skip
        _forward_apply[(triton.cdiv(rows, block),)](p, facts, bias, y, rows, **sizes)
        ctx.save_for_backward(p, which, facts, bias)
        ctx.shape, ctx.pool, ctx.rows, ctx.programs, ctx.sizes = x.shape, pool, rows, programs, sizes
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        p, which, facts, bias = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        _, channels, height, width = ctx.shape
        sums = torch.empty(ctx.programs, 2, ctx.sizes["CP"], device=dy.device)
        back = torch.empty(2, channels, device=dy.device)
        # An odd last row or column takes no part in pooling, so its gradient is zero.
        is_ragged = ctx.pool and (height % 2 or width % 2)
        make = torch.zeros if is_ragged else torch.empty
        dx = make((ctx.shape[0], height, width, channels), dtype=p.dtype, device=dy.device).permute(0, 3, 1, 2)
        _backward_sums[(ctx.programs,)](dy, p, facts, bias, sums, ctx.rows, **ctx.sizes)
        _settle[(triton.cdiv(channels, 16),)](
            sums, back, back, back, ctx.rows, 0.0, 0.0, ctx.programs, FORWARD=False, C=channels, CP=ctx.sizes["CP"],
            PROGRAMS=PROGRAMS, BLOCK=16,
        )  # fmt: skip
        _backward_apply[(triton.cdiv(ctx.rows, ctx.sizes["BLOCK"]),)](
            dy, p, which, facts, bias, back, dx, ctx.rows, height, width, POOL=ctx.pool, **ctx.sizes
        )
        return dx, back[0], None, None, None, None


def pool_norm_gelu(x: torch.Tensor, norm: torch.nn.BatchNorm2d, pool: bool) -> torch.Tensor:
    """F.gelu(norm(x), approximate="tanh"), of the pooled x where `pool` says so. The norm's weight must be ones."""
    return _PoolNormGelu.apply(x, norm.bias, norm.running_mean, norm.running_var, norm, pool)  # type: ignore[no-any-return]
