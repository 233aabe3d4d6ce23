"""Targets that losses of torch cannot take, refused before the loss is computed.

On a GPU the kernel of a loss would fail for a class that the output does not have, and the process could do nothing
more. Here the same error is raised as on a CPU, which `diagnosis.py` explains.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.engine.losses import IGNORED

OF_CLASSES = {functional.cross_entropy, functional.nll_loss}
OF_NUMBERS = {functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss}


class LossChecks(TorchFunctionMode):
    """Checks the targets of each loss of torch that is called inside. It waits for the device, so it is for trials."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        named = {**dict(zip(("input", "target"), args, strict=False)), **(kwargs or {})}
        output, target = named.get("input"), named.get("target")
        if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and not _is_in_transform(target):
            if func in OF_CLASSES:
                _check_classes(output, target, args[4] if len(args) > 4 else named.get("ignore_index", IGNORED))
            elif func in OF_NUMBERS:
                _check_sizes(output, target)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a target size")  # the step itself warns, with the user's line
            return func(*args, **(kwargs or {}))


def _is_in_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func such as vmap, in which its values cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _check_classes(output: torch.Tensor, target: torch.Tensor, ignored: int) -> None:
    """Raise the error of the CPU for a class that the output does not have."""
    if target.is_floating_point() or output.ndim == 0:
        return
    classes = output.shape[1 if output.ndim > 1 else 0]
    counted = target[target != ignored]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _check_sizes(output: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse shapes such as (32, 1) and (32,): torch would compare each output with every target, with a warning."""
    if output.ndim != target.ndim and output.numel() == target.numel() > 1:
        raise ValueError(f"Target size ({target.size()}) must be the same as input size ({output.size()})")
