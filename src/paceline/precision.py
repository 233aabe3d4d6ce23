"""Number formats of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model runs: fp32 as it is, bf16 through torch's autocast."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
