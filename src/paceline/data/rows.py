"""Data sets of tensors with one row per sample: batches are gathered on the device, without collating.

A `TensorDataset` is one; any other data set may provide its tensors with a method `as_tensors()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.order import Indices
from paceline.data.sources import SplitSubset, is_stream
from paceline.data.trees import map_tensors, tensors_in
from paceline.errors import DataError
from paceline.world import World


class Rows:
    """The samples of a data set as rows of tensors."""

    def __init__(self, tensors: tuple[torch.Tensor, ...] | dict[str, torch.Tensor], device: torch.device) -> None:
        """The tensors are moved to the device; on a CPU they are not copied."""
        self.device = device
        self.tensors = map_tensors(tensors, lambda tensor: tensor.detach().to(device))

    def gather(self, indices: torch.Tensor) -> Any:
        """The batch of these samples, equal to the one that collating them would return."""
        return map_tensors(self.tensors, lambda tensor: tensor.index_select(0, indices))

    def index_converter(self, dataset: Any) -> Callable[[Indices], torch.Tensor]:
        """A function from indices of `dataset`, which may be a subset, to indices of rows on the device."""
        base_indices = dataset.base_index_array if isinstance(dataset, SplitSubset) else lambda indices: indices

        def convert(indices: Indices) -> torch.Tensor:
            return torch.from_numpy(base_indices(indices)).to(self.device, non_blocking=True)

        return convert


class RowDataset(Dataset[Any]):
    """A data set of tensors whose batches need no collating; all other attributes are those of the data set."""

    def __init__(self, dataset: Any, rows: Rows) -> None:
        self._dataset, self._rows, self._convert = dataset, rows, rows.index_converter(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A collated batch, equal to the batch of torch's DataLoader."""
        batch = self._rows.gather(self._convert(np.asarray(indices)))
        return list(batch) if isinstance(batch, tuple) else batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # during unpickling `_dataset` is not set yet, and special methods are not delegated
            raise AttributeError(name)
        return getattr(self._dataset, name)


def as_row_dataset(dataset: Any) -> Any:
    """A RowDataset if the data set provides its tensors and they are on the CPU, else the data set itself."""
    tensors = _tensors_of(dataset.base if isinstance(dataset, SplitSubset) else dataset)
    if tensors is None or any(tensor.device.type != "cpu" for tensor in tensors_in(tensors)):
        return dataset
    return RowDataset(dataset, Rows(tensors, torch.device("cpu")))


def rows_of(dataset: Any, fraction: float, world: World) -> Rows | None:
    """The data set as rows on the rank's device, if it provides them and they fit in `fraction` of its free memory.

    All ranks: either all of them have rows, or none.
    """
    tensors = _tensors_of(dataset.base if isinstance(dataset, SplitSubset) else dataset)
    if tensors is None or not fraction:
        return None
    if world.device.type != "cuda":
        return Rows(tensors, world.device)
    needed = sum(tensor.nbytes for tensor in tensors_in(tensors) if tensor.device != world.device)
    free, _ = torch.cuda.mem_get_info(world.device)
    fits = all(world.gather_objects(needed <= fraction * free))
    return Rows(tensors, world.device) if fits else None


def _tensors_of(dataset: Any) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor] | None:
    """The tensors whose rows are the samples; None if the samples come from the data set's own methods."""
    if hasattr(dataset, "collate_fn") or is_stream(dataset):
        return None
    if hasattr(dataset, "as_tensors"):
        return _checked_tensors(dataset)
    kind = type(dataset)
    is_plain = all(
        getattr(kind, name, None) is getattr(TensorDataset, name, None) for name in ("__getitem__", "__getitems__")
    )
    return dataset.tensors if is_plain and isinstance(dataset, TensorDataset) else None


def _checked_tensors(dataset: Any) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
    returned = dataset.as_tensors() if callable(dataset.as_tensors) else None
    if not returned or not isinstance(returned, (Mapping, tuple, list)):
        raise DataError(
            f"as_tensors of {type(dataset).__name__} must be a method that returns a tuple or a dict of tensors, "
            f"one row per sample; it returned a {type(returned).__name__}"
        )
    tensors = dict(returned) if isinstance(returned, Mapping) else tuple(returned)
    for tensor in tensors.values() if isinstance(tensors, dict) else tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(dataset):
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DataError(
                f"as_tensors() of {type(dataset).__name__} returned {shape} for {len(dataset)} samples; "
                "each tensor must have one row per sample"
            )
    return tensors
