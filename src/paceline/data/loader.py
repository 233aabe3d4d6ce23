"""Indices → batches, through torch's DataLoader: lanes for the managed loop, epochs for the user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, tee
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from paceline.data import batches
from paceline.data.curriculum import Curriculum
from paceline.data.order import Indices, indices_of
from paceline.data.rows import as_row_dataset
from paceline.data.seeding import seed_for, seed_generators
from paceline.data.sources import SplitSubset, fetch
from paceline.data.workers import LoaderContext, start_worker
from paceline.errors import DataError
from paceline.world import World


class Lane(NamedTuple):
    """One micro-batch: what it is, before (`indices`) and after (`data`) it has been fetched."""

    step: int
    lane: int
    samples: int
    step_samples: int
    indices: Any  # a list, or a tensor on the device where rows are gathered there (rows.py)
    data: Any = None

    @property
    def key(self) -> tuple[str, int, int]:
        """What its random numbers depend on."""
        return "data", self.step, self.lane


class StepInputs(NamedTuple):
    """What one step takes: the lanes of this rank."""

    step: int
    epoch: int
    lanes: list[Lane]
    ends_epoch: bool  # or the run
    ends_run: bool
    breaks_off: bool = False  # the run ends in the middle of the epoch
    mark: tuple[int, int] = (0, 0)  # of an iterable data set: the next step's epoch, and the step that began it


class EvalBatch(NamedTuple):
    """One batch of an evaluation, before and after it has been fetched."""

    batch: int
    indices: Any  # as a lane's
    data: Any = None

    @property
    def key(self) -> tuple[str, int]:
        """What its random numbers depend on."""
        return "evaluation data", self.batch


Keyed = TypeVar("Keyed", Lane, EvalBatch)


class KeyedDataset(Dataset[Any]):
    """Fetches a batch with the generators keyed by what it is, so that random samples do not know their rank."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate_of(dataset)

    def __getitems__(self, batch: Keyed) -> tuple[Keyed, Any]:
        seed_generators(self.seed, *batch.key)
        return batch, fetch(self.dataset, batch.indices)

    def whole(self, batch: Keyed) -> Keyed:
        """A batch, fetched here."""
        return self.gather(self.__getitems__(batch))

    def gather(self, fetched: tuple[Keyed, Any]) -> Keyed:
        """Collate, in the DataLoader's worker."""
        batch, samples = fetched
        data = self.collate(samples)
        if data is samples:
            _check_rows(data, len(batch.indices))
        return batch._replace(data=data)


# --- the managed loop ----------------------------------------------------------------------------------------------


class LaneSampler(Sampler[Lane]):
    """The lanes of one rank, step after step, over all epochs of the run."""

    def __init__(
        self,
        *,
        seed: int,
        size: int,
        batch_size: int,
        lanes: int,
        steps: range,
        ridden: range,
        curriculum: Curriculum | None = None,
        form: Callable[[Indices], Any] = np.ndarray.tolist,
    ) -> None:
        """`form` makes the indices of many lanes into what each lane's are cut from."""
        self.seed, self.size, self.batch_size, self.lanes = seed, size, batch_size, lanes
        self.steps, self.ridden, self.curriculum, self.form = steps, ridden, curriculum, form

    def __iter__(self) -> Iterator[Lane]:
        per_epoch = batches.steps_per_epoch(self.size, self.batch_size, self.lanes)
        for epoch in range(self.steps.start // per_epoch, -(-self.steps.stop // per_epoch)):
            first = max(self.steps.start - epoch * per_epoch, 0)
            last = min(self.steps.stop - epoch * per_epoch, per_epoch)
            rides, ahead = tee(self._rides(range(first, last)))
            spans = (positions for *_, positions in ahead)
            form = partial(self._form, epoch=epoch) if self.curriculum is not None else self.form
            chosen = indices_of(spans, seed=self.seed, epoch=epoch, size=self.size, form=form)
            for (step, lane, samples, step_samples, _), indices in zip(rides, chosen, strict=True):
                yield Lane(epoch * per_epoch + step, lane, samples, step_samples, indices)

    def _form(self, indices: Indices, epoch: int) -> Any:
        assert self.curriculum is not None
        return self.form(self.curriculum.choose(indices, epoch))

    def _rides(self, steps: range) -> Iterator[tuple[int, int, int, int, range]]:
        """Each step's lanes: step, lane, samples of the lane and of the step, positions."""
        for step in steps:
            step_samples = len(batches.step_positions(step, self.size, self.batch_size, self.lanes))
            has_none = True
            for lane in self.ridden:
                if positions := self._lane(step, lane):
                    yield step, lane, len(positions), step_samples, positions
                    has_none = False
            if has_none:
                # It still takes part in the reduction of the step, with its first lane: that one borrows the samples of
                # lane 0, and its weight is zero.
                yield step, self.ridden[0], 0, step_samples, self._lane(step, 0)

    def _lane(self, step: int, lane: int) -> range:
        return batches.lane_positions(step, lane, self.size, self.batch_size, self.lanes)


def lane_loader(dataset: Any, sampler: LaneSampler, *, seed: int, workers: int, world: World) -> DataLoader[Any]:
    """The lanes of this rank in order, fetched ahead by `workers` processes."""
    return _keyed_loader(dataset, sampler, seed, workers, world)


def steps_of(lanes: Iterable[Lane], *, steps_per_epoch: int, total_steps: int) -> Iterator[StepInputs]:
    """The lanes of this rank, gathered into steps."""
    for step, ridden in groupby(lanes, key=lambda lane: lane.step):
        ends_epoch, ends_run = (step + 1) % steps_per_epoch == 0, step + 1 == total_steps
        yield StepInputs(
            step=step,
            epoch=step // steps_per_epoch,
            lanes=list(ridden),
            ends_epoch=ends_epoch or ends_run,
            ends_run=ends_run,
            breaks_off=ends_run and not ends_epoch,
        )


class EvalSampler(Sampler[EvalBatch]):
    """The batches of a data set in its own order, dealt to the ranks in turn: every sample is on exactly one rank."""

    def __init__(
        self, *, size: int, batch_size: int, world: World, form: Callable[[Indices], Any] = np.ndarray.tolist
    ) -> None:
        self.size, self.batch_size, self.world, self.form = size, batch_size, world, form
        self.batches = -(-size // batch_size)
        self.rounds = -(-self.batches // world.size)

    def __len__(self) -> int:
        return len(range(self.world.rank, self.batches, self.world.size))

    def __iter__(self) -> Iterator[EvalBatch]:
        for batch in range(self.world.rank, self.batches, self.world.size):
            positions = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, self.size))
            yield EvalBatch(batch, self.form(positions))


def evaluation_loader(dataset: Any, *, batch_size: int, seed: int, workers: int, world: World) -> DataLoader[Any]:
    """This rank's batches of a data set in its own order."""
    sampler = EvalSampler(size=len(dataset), batch_size=batch_size, world=world)
    return _keyed_loader(dataset, sampler, seed, workers, world)


# --- the user's own loop -------------------------------------------------------------------------------------------


class EpochSampler(Sampler[list[int]]):
    """The batches of one rank for one epoch; each `iter` is the next epoch, in a new order if it shuffles."""

    def __init__(self, *, seed: int, size: int, batch_size: int, world: World, shuffle: bool, what: str) -> None:
        self.seed, self.size, self.world, self.shuffle = seed, size, world, shuffle
        self.batches = batches.batches_per_rank(size, batch_size, world.size, what=what)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch by hand, as loops written for DistributedSampler do. Not needed here."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        spans = (
            batches.batch_positions(batch, self.world.rank, self.size, self.batches, self.world.size)
            for batch in range(self.batches)
        )
        if self.shuffle:
            yield from indices_of(spans, seed=self.seed, epoch=epoch, size=self.size)
        else:
            yield from map(list, spans)


class EpochLoader(DataLoader[Any]):
    """A DataLoader over this rank's share of a data set that tells how far it is."""

    def __init__(
        self, dataset: Any, sampler: EpochSampler, on_batch: Callable[[int, int, int], None], **options: Any
    ) -> None:
        quick = as_row_dataset(dataset)
        collate = collate_of(dataset) if quick is dataset else _as_it_is
        super().__init__(quick, batch_sampler=sampler, collate_fn=collate, **options)
        # torch leaves an unused default here; loops written for DistributedSampler call loader.sampler.set_epoch.
        self.__dict__["sampler"] = sampler
        self.epochs, self.on_batch = sampler, on_batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self.epochs.epoch
        for batch, data in enumerate(super().__iter__()):
            self.on_batch(epoch, batch, len(self.epochs))
            yield data


def epoch_loader(
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    workers: int,
    world: World,
    shuffle: bool,
    what: str,
    on_batch: Callable[[int, int, int], None],
) -> EpochLoader:
    """A loader for the user's own loop: every sample once per epoch over all ranks, equally many batches on each."""
    sampler = EpochSampler(seed=seed, size=len(dataset), batch_size=batch_size, world=world, shuffle=shuffle, what=what)
    return EpochLoader(dataset, sampler, on_batch, **loader_options(workers, world, seed))


# --- what all loaders share ----------------------------------------------------------------------------------------


def _keyed_loader(dataset: Any, sampler: Any, seed: int, workers: int, world: World) -> DataLoader[Any]:
    keyed = KeyedDataset(dataset, seed)
    return DataLoader(keyed, batch_sampler=sampler, collate_fn=keyed.gather, **loader_options(workers, world, seed))  # type: ignore[arg-type]


def collate_of(dataset: Any) -> Callable[[Any], Any]:
    """The data set's own `collate_fn` if it has one, else torch's default."""
    base = dataset.base if isinstance(dataset, SplitSubset) else dataset
    while isinstance(base, Subset) and not hasattr(base, "collate_fn"):
        base = base.dataset
    collate: Callable[[Any], Any] = getattr(base, "collate_fn", _collated)
    return collate


def _check_rows(batch: Any, samples: int) -> None:
    """A finished batch must have a row for each sample that was asked for."""
    for part in batch.values() if isinstance(batch, Mapping) else batch:
        if isinstance(part, torch.Tensor) and part.ndim and len(part) != samples:
            raise DataError(f"__getitems__ gave {len(part)} rows for {samples} samples; it must give one row a sample")


def _as_it_is(batch: Any) -> Any:
    return batch


def _collated(samples: Any) -> Any:
    """Samples as a batch; what `__getitems__` gave as a tuple or a dict is one already."""
    return samples if isinstance(samples, (tuple, Mapping)) else default_collate(samples)


def loader_options(workers: int, world: World, seed: int) -> dict[str, Any]:
    """What every DataLoader is given."""
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": world.device.type == "cuda"}
    if workers:
        options |= {
            "worker_init_fn": start_worker,
            "persistent_workers": True,
            "multiprocessing_context": LoaderContext(),
        }
    # The seeds of the workers come from here, so they differ between ranks.
    generator = torch.Generator()
    generator.manual_seed(seed_for(seed, "workers", world.rank))
    return {**options, "generator": generator}
