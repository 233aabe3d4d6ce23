"""The samples of one rank as a data set: `val_loader.dataset` in the user's own loop on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from paceline.data.order import Indices
from paceline.data.sources import fetch


class RankShare(Dataset[Any]):
    """A subset of a data set, whose `len()` is its size; all other attributes are those of the data set."""

    def __init__(self, dataset: Any, indices: Indices) -> None:
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return fetch(self._dataset, self._indices[list(indices)].tolist())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # during unpickling `_dataset` is not set yet, and special methods are not delegated
            raise AttributeError(name)
        return getattr(self._dataset, name)
