"""Number formats of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision of `auto`: bf16 on GPUs that support it in hardware, else fp32."""
    if precision != "auto":
        return precision
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model runs: torch's autocast for bf16 and fp16, none for fp32."""
    precision = resolve_precision(precision, device)
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=HALF_DTYPES[precision])
