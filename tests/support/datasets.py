"""Small data sets: samples of tensors that can be learnt, and samples that a function of the test makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def signed(samples: int, *shape: int, seed: int = 7) -> TensorDataset:
    """Random numbers in this shape; the class of a sample is 1 if their mean is positive, else 0."""
    numbers = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, (numbers.flatten(1).mean(1) > 0).long())


class MapDataset(Dataset[Any]):
    """A map-style data set of `size` samples; `sample` makes each from its index, or raises."""

    def __init__(self, size: int, sample: Callable[[int], Any]) -> None:
        self.size, self.sample = size, sample

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class StreamDataset(IterableDataset[Any]):
    """An iterable data set; `samples` is called when the first sample of a pass is read."""

    def __init__(self, samples: Callable[[], Iterable[Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples()
