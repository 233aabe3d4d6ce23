"""What the model is given for a lane: a batch from the DataLoader or rows gathered on the device, then augmented.

`inputs` brings to the device what changes from lane to lane. `batch` makes the model's batch of it on the device
alone, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.config import Config
from paceline.data.augment import Augment
from paceline.data.loader import (
    EvalBatch,
    EvalSampler,
    KeyedDataset,
    Lane,
    LaneSampler,
    evaluation_loader,
    lane_loader,
)
from paceline.data.rows import Rows, rows_of
from paceline.data.sources import SplitSubset, is_stream, original_indices
from paceline.data.trees import map_tensors, tensors_in, to_channels_last
from paceline.world import World

ROUND = 64  # bytes; where torch lets its own tensors begin


class LaneInputs(NamedTuple):
    """What a lane brings, on the device."""

    data: Any  # a batch; None where rows are gathered
    indices: torch.Tensor | None  # of the samples, where somebody wants to know them
    epoch: torch.Tensor | None


class Feed:
    """Feeds a data set, or a part of one, to the model of this rank."""

    def __init__(self, dataset: Any, config: Config, world: World, rows: Rows | None = None) -> None:
        """`rows` are the data set's samples on the device."""
        self.dataset, self.config, self.world, self.rows = dataset, config, world, rows
        self.by_channels = False  # how images lie in memory
        self.augment = Augment(config.augment, config.seed) if config.augment is not None else None
        self._epoch = -1, torch.tensor(-1)

    def lanes(self, sampler: Callable[..., LaneSampler]) -> Iterable[Lane]:
        """The lanes that a sampler chooses, in order; `sampler` is made here, in the form that suits the rows."""
        if self.rows is not None:
            return sampler(form=self.rows.finder(self.dataset))
        config = self.config
        lanes = lane_loader(self.dataset, sampler(), seed=config.seed, workers=config.workers, world=self.world)
        return prefetched(lanes, self.world.device) if self.world.device.type == "cuda" else lanes

    def dealt(self) -> tuple[Iterable[EvalBatch], EvalSampler]:
        """This rank's batches of the whole data set in its own order, and how they were dealt."""
        config = self.config
        if self.rows is not None:
            form = self.rows.finder(self.dataset)
            sampler = EvalSampler(size=len(self.dataset), batch_size=config.batch_size, world=self.world, form=form)
            return sampler, sampler
        loader = evaluation_loader(
            self.dataset, batch_size=config.batch_size, seed=config.seed, workers=config.workers, world=self.world
        )
        return loader, loader.batch_sampler  # type: ignore[return-value]

    def inputs(self, lane: Lane, epoch: int) -> LaneInputs:
        """What a lane brings, on the device or on its way there."""
        data = None if self.rows is not None else to_device(lane.data, self.world.device)
        if self.augment is None:
            return LaneInputs(data, lane.indices if self.rows is not None else None, None)
        indices = lane.indices
        if self.rows is None:
            # Streams count the samples of each lane from 0.
            shift = lane.lane << 40 if is_stream(self.dataset) else 0
            known = torch.tensor(self.originals(indices)) + shift
            indices = known.to(self.world.device, non_blocking=True)
        if self._epoch[0] != epoch:
            self._epoch = epoch, torch.tensor(epoch, device=self.world.device)
        return LaneInputs(data, indices, self._epoch[1])

    def batch(self, inputs: LaneInputs) -> Any:
        """The batch that the model trains on; the host has no part in it."""
        data, indices, epoch = inputs
        if self.rows is not None and indices is not None:
            data = self.rows.gather(indices)
        augment = self.augment
        if augment is not None and indices is not None and epoch is not None:
            data = with_images(data, lambda images: augment.train(images, indices, epoch))
        return to_channels_last(data) if self.by_channels else data

    def evaluation_batch(self, dealt: EvalBatch) -> Any:
        """The batch that the model is measured on."""
        rows = self.rows
        batch = to_device(dealt.data, self.world.device) if rows is None else rows.gather(dealt.indices)
        if self.augment is not None:
            batch = with_images(batch, self.augment.evaluate)
        return to_channels_last(batch) if self.by_channels else batch

    def sample(self) -> Any:
        """Some samples as the model is measured on, to try something out: a whole batch where it costs nothing."""
        indices = np.arange(min(self.config.batch_size if self.rows is not None else 2, len(self.dataset)))
        if self.rows is not None:
            return self.evaluation_batch(EvalBatch(0, self.rows.finder(self.dataset)(indices)))
        return self.evaluation_batch(KeyedDataset(self.dataset, self.config.seed).whole(EvalBatch(0, indices.tolist())))

    def originals(self, indices: Any) -> list[int]:
        """The indices that the user knows, in the data set that dataset_fn gave."""
        if isinstance(indices, torch.Tensor):  # of rows
            return indices.tolist()  # type: ignore[no-any-return]
        return original_indices(self.dataset, indices)


def make_feeds(training: Any, validation: Any | None, config: Config, world: World) -> tuple[Feed, Feed | None]:
    """The feeds of training and validation; parts of one data set have its rows in common. All ranks."""
    rows = rows_of(training, config.data_on_device, world)
    feed = Feed(training, config, world, rows)
    if validation is None:
        return feed, None
    if not (isinstance(training, SplitSubset) and isinstance(validation, SplitSubset) and training.base is validation.base):
        rows = rows_of(validation, config.data_on_device, world)
    return feed, Feed(validation, config, world, rows)


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor in a batch of tuples, lists and dicts, on the device."""
    return map_tensors(batch, lambda tensor: _to_device_aligned(tensor, device))


def _to_device_aligned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; on the CPU at a round address, because some kernels sum otherwise at odd ones."""
    there = tensor.to(device, non_blocking=True)
    is_plain = device.type == "cpu" and there.layout is torch.strided and not there.is_nested
    return there.clone() if is_plain and there.data_ptr() % ROUND else there


def prefetched(lanes: Iterable[Lane], device: torch.device) -> Iterator[Lane]:
    """The lanes with their data on the GPU; the next one's is copied on a stream of its own while one is ridden."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[Lane, torch.cuda.Event] | None = None
    for lane in lanes:
        with torch.cuda.stream(stream):
            ahead = lane._replace(data=to_device(lane.data, device))
            arrived = stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = ahead, arrived
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(lane: Lane, copied: torch.cuda.Event) -> Lane:
    present = torch.cuda.current_stream()
    present.wait_event(copied)
    for tensor in tensors_in(lane.data):
        if tensor.device.type == "cuda":  # the lengths of packed sequences are not
            tensor.record_stream(present)  # whose memory must not be used again before this stream has read it
    return lane


def with_images(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with its images changed: the first input that has four dimensions, or else the first."""
    named = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    inputs = [key for key in named if key != "labels"]
    if not isinstance(batch, Mapping):
        inputs = inputs[:-1] or inputs  # the last is the target
    images = next((key for key in inputs if getattr(named[key], "ndim", 0) == 4), inputs[0])
    named[images] = change(named[images])
    return named if isinstance(batch, Mapping) else tuple(named.values())
