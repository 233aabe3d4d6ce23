"""Losses and metrics as sums and counts, so that they can be summed over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from paceline.errors import ConfigError

IGNORED = -100  # as a class, by torch's losses
RETURN_LOSS = "return a mean over the batch, or paceline.Sum(total, count)"
Metric = Callable[[Any, Any], Any]
SumAndCount = tuple[torch.Tensor, torch.Tensor | int | float]


class Sum(NamedTuple):
    """The value of a loss or metric that is a sum: its total, and the count or sum of weights to divide it by."""

    total: torch.Tensor | float
    count: torch.Tensor | float  # type: ignore[assignment]  # a tuple has a method of this name


def accuracy(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Correct predictions, by the largest of several logits or the sign of a single one; class -100 is ignored."""
    if output.shape == (*target.shape, 1):
        output = output.squeeze(-1)
    elif output.shape == (*target.shape[:1], 1, *target.shape[1:]):
        output = output.squeeze(1)
    elif output.shape != target.shape and (*output.shape[:-1], 1) == target.shape:
        target = target.squeeze(-1)
    if output.ndim == target.ndim:
        right = (output > 0) == (target > 0.5)
        return right.sum(), right.numel()
    # The dimension of the classes is the last one, or the second as in cross_entropy.
    right = output.argmax(-1 if output.shape[:-1] == target.shape else 1) == target
    return right.sum(), (target.long() != IGNORED).sum()  # -100 cast to uint8 would be a valid class


def mse(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Squared error."""
    return _errors(output, target).square().sum(), target.numel()


def mae(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Absolute error."""
    return _errors(output, target).abs().sum(), target.numel()


def _errors(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.reshape(target.shape) - (target.to(output.dtype) if target.dtype is torch.bool else target)


NAMED: dict[str, Metric] = {"accuracy": accuracy, "mse": mse, "mae": mae}


def make_metrics(metrics: Sequence[str] | dict[str, Any]) -> dict[str, Metric]:
    """Metrics by name: built in, or the user's function(output, target)."""
    return dict(metrics) if isinstance(metrics, dict) else {name: NAMED[name] for name in metrics}


def number_on(number: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A number as a tensor on the device; tensors of plain numbers are cached, so they are copied only once."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device).reshape(())
    constant = _constant(float(number), device, dtype)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded.add(constant)  # a CUDA graph reads its memory long after it has left the cache
    return constant


_recorded: set[torch.Tensor] = set()


@lru_cache(64)
def _constant(number: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(number, device=device, dtype=dtype)


def sum_and_count(value: Any, samples: int, source: str) -> SumAndCount:
    """The sum and count of a loss or metric that returned a `Sum`, (sum, count), or a mean over `samples`."""
    if not isinstance(value, (tuple, list)):
        return mean_of(value, source) * samples, samples
    if isinstance(value, Sum):
        if not _is_divisor(value.count):
            raise ConfigError(
                f"{source} returned paceline.Sum, whose count must be one number from 0 without a gradient; give the "
                "number of samples, or the sum of their weights"
            )
    elif len(value) != 2 or not _is_count(value[1], value[0]):
        raise ConfigError(
            f"{source} returned ({', '.join(map(_described, value))}), which is not a sum and a whole count from 1; if "
            "it is a value with extras, return the value alone; if it is a sum, return paceline.Sum(total, count)"
        )
    total = _number_in(value[0], source)
    return total.float() if total.is_floating_point() and total.element_size() < 4 else total, value[1]


def _is_count(count: Any, total: Any) -> bool:
    """Whether the number beside a sum can be a count: an integer from 1, or 0 if the sum is 0."""
    if isinstance(count, torch.Tensor):
        if count.is_floating_point() or count.is_complex() or count.dtype is torch.bool or count.numel() != 1:
            return False
        if count.device.type != "cpu":  # reading it would make the host wait in every step
            return True
        count = count.item()
    if not isinstance(count, Integral) or isinstance(count, bool):
        return False
    return int(count) >= 1 or (count == 0 and not _is_nonzero(total))


def _is_nonzero(total: Any) -> bool:
    return isinstance(total, (torch.Tensor, Real)) and bool(torch.as_tensor(total).abs().gt(0).any())


def _is_divisor(count: Any) -> bool:
    """Whether the count of a `Sum` is one number without a gradient, which would be ignored, and not negative.

    A count of NaN makes the step one that is not finite.
    """
    if isinstance(count, torch.Tensor):
        # Reading it from a GPU would make the host wait in every step.
        is_known = count.device.type == "cpu" and not count.is_complex() and count.numel() == 1
        return count.numel() == 1 and not count.requires_grad and not (is_known and bool(count < 0))
    return isinstance(count, Real) and not count < 0


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor {str(value.dtype).removeprefix('torch.')}"
    return str(value) if isinstance(value, Real) else type(value).__name__


def mean_of(value: Any, source: str) -> torch.Tensor:
    """A loss or metric that is a mean, as a single number."""
    if value is None:
        raise ConfigError(f"{source} returned None; {RETURN_LOSS}")
    mean = _number_in(value, source)
    is_short = mean.is_floating_point() and mean.element_size() < 4  # 8 bits of precision are too few for a sum
    return mean.float() if is_short else mean


def problem_with_loss(value: Any, source: str) -> str | None:
    """Why backward cannot start from the value of a loss: a number, or a tensor without a gradient; None if it can."""
    total = value[0] if isinstance(value, (tuple, list)) and value else value
    if isinstance(total, Real) and not isinstance(total, torch.Tensor):
        kind = type(total).__name__
        return f"{source} returned a {kind}, which has no gradient; return the tensor itself, without item() or float()"
    if isinstance(total, torch.Tensor) and not total.requires_grad:
        return (
            f"{source} returned a loss without a gradient; compute it from the model's output, without detach, item or "
            "float, and not under no_grad"
        )
    return None


def _number_in(value: Any, source: str) -> torch.Tensor:
    try:
        number = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{source} returned a {type(value).__name__}; {RETURN_LOSS}") from None
    if number.numel() != 1:
        raise ConfigError(f"{source} returned a tensor of shape {tuple(number.shape)}; {RETURN_LOSS}")
    if number.is_complex():
        raise ConfigError(f"{source} returned a complex number; return its absolute value, or its real part")
    return number.reshape(()) if number.ndim else number
