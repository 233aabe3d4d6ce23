"""Number formats of the forward pass, the loss scale that fp16 needs, and how images lie in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROW_AFTER = 2000  # good steps in a row


def resolve(precision: str, device: torch.device) -> str:
    """What `auto` means on a device: bf16 where a GPU has it in hardware, else fp32."""
    if precision != "auto":
        return precision
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model runs: fp32 as it is, bf16 and fp16 through torch's autocast."""
    precision = resolve(precision, device)
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


@dataclass
class Scaler:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16.

    Always a power of two: multiplying and dividing by it rounds nothing.
    """

    scale: float = 2.0**16
    good_steps: int = 0  # since the scale last changed

    def grow(self) -> None:
        """After a good step: try twice the scale now and then."""
        self.good_steps += 1
        if self.good_steps == GROW_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0

    def shrink(self) -> None:
        """After a step whose gradients were too large for fp16."""
        self.scale, self.good_steps = self.scale / 2, 0
