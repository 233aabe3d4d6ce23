"""Data sets that are tensors, one row a sample: batches are gathered where the model reads them, without collating.

A `TensorDataset` is one; any other data set may offer its tensors with a method `as_tensors()`.
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
        """The tensors are moved to the device; on a CPU they stay where they lie."""
        self.device = device
        self.tensors = map_tensors(tensors, lambda tensor: tensor.detach().to(device))

    def gather(self, indices: torch.Tensor) -> Any:
        """The batch of these samples, as collating them one by one would give it."""
        return map_tensors(self.tensors, lambda tensor: tensor.index_select(0, indices))

    def finder(self, dataset: Any) -> Callable[[Indices], torch.Tensor]:
        """How indices of `dataset`, which may be a part of the whole, become indices of rows on the device."""
        originals = dataset.originals_of if isinstance(dataset, SplitSubset) else lambda indices: indices

        def find(indices: Indices) -> torch.Tensor:
            return torch.from_numpy(originals(indices)).to(self.device, non_blocking=True)

        return find


class RowDataset(Dataset[Any]):
    """A data set of tensors whose batches need no collating; in all else the data set itself."""

    def __init__(self, dataset: Any, rows: Rows) -> None:
        self._dataset, self._rows, self._find = dataset, rows, rows.finder(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A finished batch, as torch's DataLoader would make it of the samples."""
        batch = self._rows.gather(self._find(np.asarray(indices)))
        return list(batch) if isinstance(batch, tuple) else batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not there yet, or somebody looks for a method of Python's
            raise AttributeError(name)
        return getattr(self._dataset, name)


def as_row_dataset(dataset: Any) -> Any:
    """The data set, in a form that gathers whole batches if it offers its tensors and they lie on the CPU."""
    tensors = _offered_by(dataset.base if isinstance(dataset, SplitSubset) else dataset)
    if tensors is None or any(tensor.device.type != "cpu" for tensor in tensors_in(tensors)):
        return dataset
    return RowDataset(dataset, Rows(tensors, torch.device("cpu")))


def rows_of(dataset: Any, part: float, world: World) -> Rows | None:
    """The data set as rows on the rank's device, if it offers them and they fit in `part` of its free memory.

    All ranks: either all of them have rows, or none.
    """
    tensors = _offered_by(dataset.base if isinstance(dataset, SplitSubset) else dataset)
    if tensors is None or not part:
        return None
    if world.device.type != "cuda":
        return Rows(tensors, world.device)
    needed = sum(tensor.nbytes for tensor in tensors_in(tensors) if tensor.device != world.device)
    free, _ = torch.cuda.mem_get_info(world.device)
    fits = all(world.gather_objects(needed <= part * free))
    return Rows(tensors, world.device) if fits else None


def _offered_by(dataset: Any) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor] | None:
    """The tensors whose rows are the samples; None where only the data set itself can make its samples."""
    if hasattr(dataset, "collate_fn") or is_stream(dataset):
        return None
    if hasattr(dataset, "as_tensors"):
        return _checked(dataset)
    kind = type(dataset)
    is_plain = all(
        getattr(kind, name, None) is getattr(TensorDataset, name, None) for name in ("__getitem__", "__getitems__")
    )
    return dataset.tensors if is_plain and isinstance(dataset, TensorDataset) else None


def _checked(dataset: Any) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
    offered = dataset.as_tensors() if callable(dataset.as_tensors) else None
    if not offered or not isinstance(offered, (Mapping, tuple, list)):
        raise DataError(
            f"as_tensors of {type(dataset).__name__} must be a method that returns a tuple or a dict of tensors, "
            f"one row a sample; it gave a {type(offered).__name__}"
        )
    tensors = dict(offered) if isinstance(offered, Mapping) else tuple(offered)
    for tensor in tensors.values() if isinstance(tensors, dict) else tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(dataset):
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DataError(
                f"as_tensors() of {type(dataset).__name__} gave {shape} for {len(dataset)} samples; "
                "each tensor must have one row a sample"
            )
    return tensors
