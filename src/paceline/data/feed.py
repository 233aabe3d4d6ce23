"""The batches that the model receives: from a DataLoader or gathered from rows on the device, then augmented.

`inputs` copies to the device the data that changes from lane to lane. `batch` computes the model's batch from it on the
device only, so that a CUDA graph can contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.config import Config
from paceline.data.augment import Augment
from paceline.data.evaluation import EvalBatch, EvalSampler, evaluation_loader
from paceline.data.lanes import Lane, LaneSampler
from paceline.data.loader import KeyedDataset, keyed_loader
from paceline.data.rows import Rows, rows_of
from paceline.data.sources import SplitSubset, is_stream, original_indices
from paceline.data.trees import map_tensors, tensors_in, to_channels_last
from paceline.world import World

ALIGNMENT = 64  # bytes; the addresses of torch's own tensors are multiples of it


class LaneInputs(NamedTuple):
    """The inputs of a lane on the device: all data that changes from lane to lane."""

    data: Any  # a batch; None if rows are gathered
    indices: torch.Tensor | None  # of the samples, if rows are gathered or images augmented
    epoch: torch.Tensor | None


class Feed:
    """Creates the batches of a data set for the model of this rank."""

    def __init__(self, dataset: Any, config: Config, world: World, rows: Rows | None = None) -> None:
        """`rows` are the data set's samples on the device."""
        self.dataset, self.config, self.world, self.rows = dataset, config, world, rows
        self.is_channels_last = False  # the memory format of images
        self.augment = Augment(config.augment, config.seed) if config.augment is not None else None
        self._epoch = -1, torch.tensor(-1)

    def lanes(self, sampler: Callable[..., LaneSampler]) -> Iterable[Lane]:
        """The lanes of a sampler, in order; `sampler` creates it, with the `convert` that the rows need."""
        if self.rows is not None:
            return sampler(convert=self.rows.index_converter(self.dataset))
        lanes = keyed_loader(self.dataset, sampler(), **self._loader_options())
        return prefetched(lanes, self.world.device) if self.world.device.type == "cuda" else lanes

    def evaluation_batches(self) -> tuple[Iterable[EvalBatch], EvalSampler]:
        """This rank's batches of the whole data set in its own order, and their sampler."""
        batch_size = self.config.evaluate.batch_size or self.config.batch_size
        if self.rows is not None:
            convert = self.rows.index_converter(self.dataset)
            sampler = EvalSampler(size=len(self.dataset), batch_size=batch_size, world=self.world, convert=convert)
            return sampler, sampler
        loader = evaluation_loader(self.dataset, batch_size=batch_size, **self._loader_options())
        return loader, loader.batch_sampler  # type: ignore[return-value]

    def _loader_options(self) -> dict[str, Any]:
        config = self.config
        return {
            "seed": config.seed,
            "workers": config.workers,
            "world": self.world,
            "collate": config.collate,
        }

    def inputs(self, lane: Lane, epoch: int) -> LaneInputs:
        """The inputs of a lane, on the device or being copied to it."""
        data = None if self.rows is not None else to_device(lane.data, self.world.device)
        if self.augment is None:
            return LaneInputs(data, lane.indices if self.rows is not None else None, None)
        indices = lane.indices
        if self.rows is None:
            # The samples of an iterable data set are counted from 0 in each lane.
            shift = lane.lane << 40 if is_stream(self.dataset) else 0
            known = torch.tensor(self.original_indices(indices)) + shift
            indices = known.to(self.world.device, non_blocking=True)
        if self._epoch[0] != epoch:
            self._epoch = epoch, torch.tensor(epoch, device=self.world.device)
        return LaneInputs(data, indices, self._epoch[1])

    def batch(self, inputs: LaneInputs) -> Any:
        """The batch that the model trains on, computed only on the device."""
        data, indices, epoch = inputs
        if self.rows is not None and indices is not None:
            data = self.rows.gather(indices)
        augment = self.augment
        if augment is not None and indices is not None and epoch is not None:
            data = with_images(data, lambda images: augment.train(images, indices, epoch))
        return to_channels_last(data) if self.is_channels_last else data

    def evaluation_batch(self, batch: EvalBatch) -> Any:
        """The batch that the model is evaluated on."""
        rows = self.rows
        data = to_device(batch.data, self.world.device) if rows is None else rows.gather(batch.indices)
        if self.augment is not None:
            data = with_images(data, self.augment.evaluate)
        return to_channels_last(data) if self.is_channels_last else data

    def sample(self) -> Any:
        """A batch for trial calls, as in evaluation: two samples, or a full batch if rows make it cheap."""
        indices = np.arange(min(self.config.batch_size if self.rows is not None else 2, len(self.dataset)))
        if self.rows is not None:
            return self.evaluation_batch(EvalBatch(0, self.rows.index_converter(self.dataset)(indices)))
        keyed = KeyedDataset(self.dataset, self.config.seed, self.config.collate)
        return self.evaluation_batch(keyed.load(EvalBatch(0, indices.tolist())))

    def original_indices(self, indices: Any) -> list[int]:
        """The indices of samples in the data set that dataset_fn returned."""
        if isinstance(indices, torch.Tensor):  # of rows
            return indices.tolist()  # type: ignore[no-any-return]
        return original_indices(self.dataset, indices)


def make_feeds(training: Any, validation: Any | None, config: Config, world: World) -> tuple[Feed, Feed | None]:
    """The feeds of training and validation; subsets of one data set share its rows. All ranks."""
    # A collate_fn of the config creates the batches.
    fraction = 0.0 if config.collate_fn is not None else config.data_on_device
    rows = rows_of(training, fraction, world)
    feed = Feed(training, config, world, rows)
    if validation is None:
        return feed, None
    are_subsets = isinstance(training, SplitSubset) and isinstance(validation, SplitSubset)
    if not (are_subsets and training.base is validation.base):
        rows = rows_of(validation, fraction, world)
    return feed, Feed(validation, config, world, rows)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device."""
    return map_tensors(batch, lambda tensor: _to_device_aligned(tensor, device))


def _to_device_aligned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; on the CPU at an aligned address, since the order of sums in kernels depends on it."""
    moved = tensor.to(device, non_blocking=True)
    is_plain = device.type == "cpu" and moved.layout is torch.strided and not moved.is_nested
    return moved.clone() if is_plain and moved.data_ptr() % ALIGNMENT else moved


def prefetched(lanes: Iterable[Lane], device: torch.device) -> Iterator[Lane]:
    """The lanes with their data on the GPU; the next one is copied on a separate stream while one is processed."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    previous: tuple[Lane, torch.cuda.Event] | None = None
    for lane in lanes:
        with torch.cuda.stream(stream):
            ahead = lane._replace(data=to_device(lane.data, device))
            copied = stream.record_event()
        if previous is not None:
            yield _after_copy(*previous)
        previous = ahead, copied
    if previous is not None:
        yield _after_copy(*previous)


def _after_copy(lane: Lane, copied: torch.cuda.Event) -> Lane:
    """The lane, for use on the current stream after its data is copied."""
    present = torch.cuda.current_stream()
    present.wait_event(copied)
    for tensor in tensors_in(lane.data):
        if tensor.device.type == "cuda":  # the lengths of packed sequences stay on the CPU
            tensor.record_stream(present)  # its memory must not be reused before this stream has read it
    return lane


def with_images(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with changed images: the first input with four dimensions, or else the first input."""
    named = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    inputs = [key for key in named if key != "labels"]
    if not isinstance(batch, Mapping):
        inputs = inputs[:-1] or inputs  # the last item is the target
    images = next((key for key in inputs if getattr(named[key], "ndim", 0) == 4), inputs[0])
    named[images] = change(named[images])
    return named if isinstance(batch, Mapping) else tuple(named.values())
