"""A layer that standardises features, fitted on the training data once before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.data.evaluation import EvalBatch
from paceline.data.loader import Collate, KeyedDataset
from paceline.data.rows import RowDataset, as_row_dataset
from paceline.data.sources import is_stream
from paceline.errors import DataError
from paceline.observe.progress import Progress

CHUNK = 4096  # samples per chunk


class StandardScaler(torch.nn.Module):
    """`(x - mean) / spread` for each feature, as the first layer of a model; spread is the standard deviation.

    Both are computed only from the training data, never from the validation data. They are buffers, so they are saved,
    broadcast and exported with the weights. A constant feature is only shifted.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, features: int, of: int | str = 0) -> None:
        """`of` selects the part of a sample to scale: its position in a tuple, or its key in a dict."""
        super().__init__()
        self.of = of
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.spread

    def fit(self, chunks: Iterable[torch.Tensor]) -> None:
        """Compute mean and spread of samples, one per row, in 64 bits; chunks are merged by their means."""
        count, mean = 0, torch.zeros_like(self.mean, dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for chunk in chunks:
            rows = chunk.to(mean).reshape(-1, len(mean))
            chunk_mean = rows.mean(0)
            difference = chunk_mean - mean
            total = count + len(rows)
            squares = squares + ((rows - chunk_mean) ** 2).sum(0) + difference**2 * (count * len(rows) / total)
            mean, count = mean + difference * (len(rows) / total), total
        spread = (squares / max(count, 1)).sqrt()
        self.mean.copy_(mean)
        # Because of rounding, the mean of a constant feature may differ from its value by one ulp.
        self.spread.copy_(torch.where(spread > 1e-12 * mean.abs(), spread, 1.0))


def fit_scalers(
    model: torch.nn.Module, training: Any, seed: int, progress: Progress, collate: Collate | None = None
) -> None:
    """Fit every StandardScaler of a model on the training data; every rank computes the same numbers."""
    scalers = [(name, module) for name, module in model.named_modules() if isinstance(module, StandardScaler)]
    if not scalers:
        return
    progress.phase = "fitting the scaler"
    if is_stream(training):
        raise DataError(
            "StandardScaler needs a data set with a length; scale the samples of an iterable data set yourself"
        )
    for name, scaler in scalers:
        try:
            scaler.fit(_chunks(training, seed, scaler.of, collate))
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise DataError(
                f"StandardScaler {name} cannot be fitted on part {scaler.of!r} of the samples: {error}"
            ) from None
        if not_finite := (~(scaler.mean.isfinite() & scaler.spread.isfinite())).nonzero().flatten().tolist():
            raise DataError(
                f"StandardScaler {name} cannot be fitted: feature {not_finite[0]} (the first is 0) of the training "
                "data has values that are not finite; replace them, or remove these samples"
            )


def _chunks(dataset: Any, seed: int, of: int | str, collate: Collate | None) -> Iterator[torch.Tensor]:
    source, keyed = dataset if collate else as_row_dataset(dataset), KeyedDataset(dataset, seed, collate)
    for number, start in enumerate(range(0, len(dataset), CHUNK)):
        indices = list(range(start, min(start + CHUNK, len(dataset))))
        has_rows = isinstance(source, RowDataset)
        data = source.__getitems__(indices) if has_rows else keyed.load(EvalBatch(number, indices)).data
        yield data[of] if isinstance(of, int) or isinstance(data, Mapping) else getattr(data, of)
