"""The cross entropy of a linear layer over many classes, such as a vocabulary, without materialising all logits.

Tokens are processed in chunks. Forward also computes the gradients, while the logits of a chunk are in memory; backward
only scales them. Softmax and loss of a chunk are computed by `softmax_kernel.py` on a GPU, by torch elsewhere.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, Literal

import torch

ALIGNMENT = 128  # classes; matrix products of odd sizes, such as GPT-2's 50,257, miss the fast kernels


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int = 8192,
) -> torch.Tensor:
    """`cross_entropy(hidden @ weight.T, target)` with the logits of `chunk` tokens at a time.

    Shapes: hidden (…, features), weight (classes, features), target (…). Products have autocast's dtype if it is
    on, else that of hidden; softmax, loss and the sum of the weight's gradient are in fp32 or more. The loss is NaN if
    a target is not a class.
    """
    _check(hidden, weight, target, reduction, chunk)
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    flat = hidden.reshape(-1, hidden.shape[-1])
    total: torch.Tensor = _op(flat, weight, target.reshape(-1), ignore_index, chunk, _dtype_of(hidden), *wanted)[0]
    if reduction == "sum":
        return total
    count = (target != ignore_index).sum()
    # If all tokens are ignored, the mean is NaN and all gradients are zero, as in torch.
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: str, chunk: int) -> None:
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} do not fit; "
            "use (…, features), (classes, features) and (…)"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is not known; use 'mean' or 'sum'")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is too small; use at least 1 token")


def _dtype_of(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the products, by the rules of autocast, which does not change fp64."""
    kind = hidden.device.type
    is_cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else hidden.dtype


# --- a custom operator of torch, which torch.compile does not trace into --------------------------------------------


@torch.library.custom_op(
    "paceline::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, int ignore_index, int chunk, ScalarType dtype, "
    "bool for_hidden, bool for_weight) -> (Tensor, Tensor, Tensor)",
)
def _op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses, and its gradients by hidden and by weight, empty if not requested."""
    with torch.autocast(hidden.device.type, enabled=False):
        total, by_hidden, by_weight = _loss_in_chunks(
            hidden.to(dtype), _padded(weight, dtype), target,
            classes=len(weight), ignore_index=ignore_index, chunk=chunk, wanted=(for_hidden, for_weight),
        )  # fmt: skip
    return total, by_hidden, by_weight


@_op.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int, chunk: int,
    dtype: torch.dtype, for_hidden: bool, for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    exact, (classes, features) = torch.promote_types(dtype, torch.float32), weight.shape
    return (
        hidden.new_empty((), dtype=exact),
        hidden.new_empty(hidden.shape if for_hidden else (0, features), dtype=dtype),
        weight.new_empty((_aligned(classes) if for_weight else 0, features), dtype=exact),
    )


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.classes = len(inputs[1])


def _scale_gradients(ctx: Any, incoming: torch.Tensor, *by_gradients: torch.Tensor | None) -> tuple[Any, ...]:
    if any(one is not None for one in by_gradients):
        raise RuntimeError("linear_cross_entropy has no second derivative; use cross_entropy on the logits")
    by_hidden, by_weight = ctx.saved_tensors
    scale = incoming.view(1)  # a vector of one element, so that 16 bits times 32 bits give 32 bits, in one kernel
    # Not in place: backward may run again on a retained graph. Autograd casts to the dtypes of the inputs.
    return (
        by_hidden * scale if ctx.needs_input_grad[0] else None,
        by_weight[: ctx.classes] * scale if ctx.needs_input_grad[1] else None,
        *[None] * 6,
    )


_op.register_autograd(_scale_gradients, setup_context=_save_gradients)


# --- the computation -------------------------------------------------------------------------------------------------


def _padded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in this dtype, with rows of zeros up to a multiple of ALIGNMENT."""
    classes, features = weight.shape
    if classes == _aligned(classes):
        return weight.to(dtype)
    padded = torch.empty(_aligned(classes), features, dtype=dtype, device=weight.device)
    padded[:classes].copy_(weight)
    padded[classes:].zero_()
    return padded


def _aligned(classes: int) -> int:
    return -(-classes // ALIGNMENT) * ALIGNMENT


def _loss_in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    classes: int,
    ignore_index: int,
    chunk: int,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses, and its gradients by hidden and by the weight with its padding."""
    tokens, exact = len(hidden), torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.empty(tokens, dtype=exact, device=hidden.device)
    logits = torch.empty(min(chunk, tokens), len(weight), dtype=hidden.dtype, device=hidden.device)
    by_hidden = torch.empty_like(hidden if wanted[0] else hidden[:0])
    by_weight = torch.zeros_like(weight if wanted[1] else weight[:0], dtype=exact)
    softmax = _kernel() if hidden.is_cuda and exact == torch.float32 and _has_triton() else softmax_by_torch
    for start in range(0, tokens, chunk):
        here = slice(start, start + chunk)
        part = logits[: len(hidden[here])]
        torch.mm(hidden[here], weight.T, out=part)
        softmax(part, target[here], losses[here], classes, ignore_index, any(wanted))  # overwritten by gradients
        if wanted[0]:
            torch.mm(part, weight, out=by_hidden[here])
        if wanted[1]:
            _add_product(by_weight, part.T, hidden[here])
    return losses.sum(), by_hidden, by_weight


def softmax_by_torch(
    logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, classes: int, ignore_index: int, wanted: bool
) -> None:
    """Write each row's loss and, if `wanted`, replace its logits by their gradient; the rest is padding."""
    counts = target != ignore_index
    known = counts & (target >= 0) & (target < classes)
    label = target.where(known, 0).long().unsqueeze(1)
    logits[:, classes:] = -torch.inf
    scores = logits.log_softmax(1, dtype=losses.dtype)
    loss = -scores.gather(1, label).squeeze(1)
    losses.copy_(loss.where(known, torch.nan).where(counts, 0.0))
    if wanted:
        gradient = scores.exp_()
        gradient.scatter_(1, label, gradient.gather(1, label) - known.to(gradient.dtype).unsqueeze(1))
        logits.copy_(gradient.masked_fill_(~counts.unsqueeze(1), 0.0))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right`, where total has at least 32 bits.

    cuBLAS adds to the total in one kernel, without rounding to bf16. Elsewhere a chunk's product is rounded once.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _adds_in_32_bits(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total.add_(left @ right)


@cache
def _adds_in_32_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch can add products of 16-bit matrices to a 32-bit sum on this device."""
    total, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernel() -> Any:
    from paceline.engine.softmax_kernel import (
        softmax_by_kernel,  # needs Triton, which is installed only with CUDA builds of torch
    )

    return softmax_by_kernel
