"""Softmax, loss and gradient of a chunk of logits in one kernel: read twice, written once, in place.

Importing it needs Triton. One program computes one row, and nothing is summed across programs, so results are
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 16


def softmax_by_kernel(
    logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, classes: int, ignore_index: int, wanted: bool
) -> None:
    """The same as `fused_loss.softmax_by_torch`, for fp32, bf16 and fp16; `logits` must be contiguous."""
    tokens, columns = logits.shape
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _softmax_kernel[(tokens,)](
            logits, target.contiguous(), losses, columns, classes, ignore_index,
            BLOCK=block, WANTED=wanted, num_warps=WARPS if block == BLOCK else 4,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(logits, targets, losses, columns, classes, ignore_index, BLOCK: tl.constexpr, WANTED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    counts = target != ignore_index
    is_known = (target >= 0) & (target < classes)
    # Read before the reductions below, which synchronise all threads: after them the row is overwritten.
    label = tl.load(logits + target, mask=is_known, other=float("nan")).to(tl.float32)

    # Masks use `columns`, which is aligned, so that loads are wide; `classes` may be odd.
    highest, total = -3.4e38, 0.0  # not −inf, from which −inf could not be subtracted
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        x = tl.where(at < classes, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        highest = higher
    log_sum = highest + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - label, 0.0))

    if WANTED:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            x = tl.where(at < classes, x, float("-inf"))
            gradient = tl.exp(x - log_sum) - tl.where(is_known & (at == target), 1.0, 0.0)
            tl.store(logits + at, tl.where(counts, gradient, 0.0), mask=at < columns)
