"""A layer that brings features to mean 0 and spread 1: the run measures its training data once, before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.data.loader import EvalBatch, KeyedDataset
from paceline.data.rows import RowDataset, as_row_dataset
from paceline.data.sources import is_stream
from paceline.errors import DataError
from paceline.observe.progress import Progress

CHUNK = 4096  # samples that are looked at together


class StandardScaler(torch.nn.Module):
    """`(x - mean) / spread`, feature by feature, as the first thing that a model does with its numbers.

    Mean and spread are those of the training data alone, never of the validation data. They are buffers, so they are
    saved, sent and exported with the weights. A feature that never changes is only moved.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, features: int, of: int | str = 0) -> None:
        """`of` says which part of a sample it scales: its place in a tuple, or its key in a dict."""
        super().__init__()
        self.of = of
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.spread

    def fit(self, chunks: Iterable[torch.Tensor]) -> None:
        """Measure samples, one row each. What one chunk adds to another is computed from their means, in 64 bits."""
        count, mean = 0, torch.zeros_like(self.mean, dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for chunk in chunks:
            rows = chunk.to(mean).reshape(-1, len(mean))
            here, apart = rows.mean(0), rows.mean(0) - mean
            total = count + len(rows)
            squares = squares + ((rows - here) ** 2).sum(0) + apart**2 * (count * len(rows) / total)
            mean, count = mean + apart * (len(rows) / total), total
        spread = (squares / max(count, 1)).sqrt()
        self.mean.copy_(mean)
        # Rounding leaves the mean of a feature that never changes an ulp beside it.
        self.spread.copy_(torch.where(spread > 1e-12 * mean.abs(), spread, 1.0))


def fit_scalers(model: torch.nn.Module, training: Any, seed: int, progress: Progress) -> None:
    """Fit every StandardScaler of a model on the training data: the same numbers on every rank."""
    scalers = [(name, module) for name, module in model.named_modules() if isinstance(module, StandardScaler)]
    if not scalers:
        return
    progress.phase = "fitting the scaler"
    if is_stream(training):
        raise DataError("StandardScaler needs a data set with a length; scale the samples of an iterable one yourself")
    for name, scaler in scalers:
        try:
            scaler.fit(_chunks(training, seed, scaler.of))
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise DataError(
                f"StandardScaler {name} cannot be fitted on part {scaler.of!r} of the samples: {error}"
            ) from None
        if strange := (~(scaler.mean.isfinite() & scaler.spread.isfinite())).nonzero().flatten().tolist():
            raise DataError(
                f"StandardScaler {name} cannot be fitted: feature {strange[0]} (the first is 0) of the training data "
                "has values that are not finite; fill them in, or leave such samples out"
            )


def _chunks(dataset: Any, seed: int, of: int | str) -> Iterator[torch.Tensor]:
    source, one_by_one = as_row_dataset(dataset), KeyedDataset(dataset, seed)
    for number, start in enumerate(range(0, len(dataset), CHUNK)):
        indices = list(range(start, min(start + CHUNK, len(dataset))))
        is_tensors = isinstance(source, RowDataset)
        data = source.__getitems__(indices) if is_tensors else one_by_one.whole(EvalBatch(number, indices)).data
        yield data[of] if isinstance(of, int) or isinstance(data, Mapping) else getattr(data, of)
