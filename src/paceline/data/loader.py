"""The common parts of all DataLoaders: their options, the collation of samples, and keyed random generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from paceline.data.seeding import seed_for, seed_generators
from paceline.data.sources import SplitSubset, fetch
from paceline.data.workers import LoaderContext, WorkerLoader, start_worker
from paceline.errors import DataError
from paceline.world import World

if TYPE_CHECKING:
    from typing_extensions import Self


class KeyedBatch(Protocol):
    """A named tuple that describes a batch before it is fetched, and contains its data afterwards."""

    @property
    def indices(self) -> Any:
        """The samples of the batch."""

    @property
    def key(self) -> tuple[int | str, ...]:
        """The key of its random numbers."""

    def _replace(self, *, data: Any) -> Self: ...


Keyed = TypeVar("Keyed", bound=KeyedBatch)
Collate: TypeAlias = Callable[[Any], Any]  # from a list of samples to a batch


class KeyedDataset(Dataset[Any]):
    """Fetches a batch with generators keyed by the batch, so that random samples do not depend on the rank."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None = None) -> None:
        """`collate` is the config's `collate_fn`."""
        self.dataset = dataset
        self.seed = seed
        self.collate = collate_of(dataset, collate)

    def __getitems__(self, batch: Keyed) -> tuple[Keyed, Any]:
        seed_generators(self.seed, *batch.key)
        return batch, fetch(self.dataset, batch.indices)

    def load(self, batch: Keyed) -> Keyed:
        """The batch with its data, fetched in this process."""
        return self.collate_batch(self.__getitems__(batch))

    def collate_batch(self, fetched: tuple[Keyed, Any]) -> Keyed:
        """The batch with its samples collated; called in the DataLoader's worker, directly after they were fetched."""
        batch, samples = fetched
        data = self.collate(samples)
        if data is samples and isinstance(data, (tuple, Mapping)):
            _check_rows(data, len(batch.indices))
        return batch._replace(data=data)


def keyed_loader(
    dataset: Any, sampler: Sampler[Any], *, seed: int, workers: int, world: World, collate: Collate | None = None
) -> DataLoader[Any]:
    """The batches that a sampler describes, in its order, fetched ahead by `workers` processes."""
    keyed, options = KeyedDataset(dataset, seed, collate), loader_options(workers, world, seed)
    return WorkerLoader(keyed, batch_sampler=sampler, collate_fn=keyed.collate_batch, **options)  # type: ignore[arg-type]


def collate_of(dataset: Any, chosen: Collate | None = None) -> Collate:
    """The config's `collate_fn` if it has one, else the data set's own, else torch's default."""
    if chosen is not None:
        return chosen
    base = dataset.base if isinstance(dataset, SplitSubset) else dataset
    while isinstance(base, Subset) and not hasattr(base, "collate_fn"):
        base = base.dataset
    collate: Collate = getattr(base, "collate_fn", _default_collate)
    return collate


def no_collate(batch: Any) -> Any:
    """The `collate_fn` of a DataLoader whose data set returns finished batches."""
    return batch


def loader_options(workers: int, world: World, seed: int) -> dict[str, Any]:
    """The keyword arguments of every DataLoader."""
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": world.device.type == "cuda"}
    if workers:
        options |= {
            "worker_init_fn": start_worker,
            "persistent_workers": True,
            "multiprocessing_context": LoaderContext(),
        }
    # The DataLoader seeds its workers from this generator, so their seeds differ between ranks.
    generator = torch.Generator()
    generator.manual_seed(seed_for(seed, "workers", world.rank))
    return {**options, "generator": generator}


def _check_rows(batch: Any, samples: int) -> None:
    """Raise if a batch from `__getitems__` does not have one row for each sample."""
    for part in batch.values() if isinstance(batch, Mapping) else batch:
        if isinstance(part, torch.Tensor) and part.ndim and len(part) != samples:
            raise DataError(
                f"__getitems__ returned {len(part)} rows for {samples} samples; it must return one row per sample"
            )


def _default_collate(samples: Any) -> Any:
    """Samples as a batch; a tuple or a dict from `__getitems__` is already one."""
    return samples if isinstance(samples, (tuple, Mapping)) else default_collate(samples)
