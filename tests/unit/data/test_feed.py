"""What the model is given, by both ways to it: the DataLoader, and rows that are gathered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.config import Config, build
from paceline.data import batches
from paceline.data.augment import Augment
from paceline.data.evaluation import evaluation_loader
from paceline.data.feed import Feed, make_feeds, to_device, with_images
from paceline.data.lanes import Lane, LaneSampler, RankLanes
from paceline.data.loader import keyed_loader
from paceline.data.rows import rows_of
from paceline.data.sources import SplitSubset
from paceline.world import World
from support.datasets import StreamDataset
from support.worlds import world_of

SIZE, BATCH, LANES = 23, 3, 4  # two steps an epoch; the second is short
IMAGES = torch.randint(
    0, 256, (SIZE, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
)  # fmt: skip
WHOLE = TensorDataset(IMAGES, torch.arange(SIZE))
PART = SplitSubset(WHOLE, 5, range(2, 21))
AUGMENT = {"normalize": {"mean": [0.5], "std": [0.25]}, "flip": "random", "translate": 2, "cutout": 2}

MakeConfig = Callable[..., Config]


def feed_of(dataset: Any, config: Config, here: World, way: str) -> Feed:
    rows = rows_of(dataset, 0.5, here) if way == "rows" else None
    assert (rows is not None) == (way == "rows")
    return Feed(dataset, config, here, rows)


def trained_on(feed: Feed) -> list[tuple[Any, ...]]:
    """Each lane of three epochs: its fields, its batch, and the original indices."""
    size, here = len(feed.dataset), feed.world
    per_epoch = batches.steps_per_epoch(size, BATCH, LANES)
    sampler = partial(
        LaneSampler, seed=1, size=size, batch_size=BATCH, steps=range(3 * per_epoch),
        rank_lanes=RankLanes(LANES, here.size, here.rank),
    )  # fmt: skip
    found = []
    for lane in feed.lanes(sampler):
        images, numbers = feed.batch(feed.inputs(lane, lane.step // per_epoch))
        facts = lane.step, lane.lane, lane.samples, lane.step_samples, feed.original_indices(lane.indices)
        found.append((*facts, images.numpy().tobytes(), numbers.tolist()))
    return found


def measured_on(feed: Feed) -> list[tuple[Any, ...]]:
    evaluated, sampler = feed.evaluation_batches()
    found = [(one, *feed.evaluation_batch(one)) for one in evaluated]
    assert len(sampler) == len(found)
    return [(d.batch, feed.original_indices(d.indices), images.numpy().tobytes(), y.tolist()) for d, images, y in found]


# --- both ways give the same ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [None, AUGMENT], ids=["plain", "augmented"])
@pytest.mark.parametrize("dataset", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (3, 4)])
def test_training_has_the_same_batches_from_rows_and_loader(
    make_config: MakeConfig, dataset: Any, augment: Any, rank: int, ranks: int
) -> None:
    config, here = make_config(batch_size=BATCH, augment=augment, seed=1), world_of(rank, ranks)
    gathered = trained_on(feed_of(dataset, config, here, "rows"))
    assert gathered == trained_on(feed_of(dataset, config, here, "loader"))
    # Each sample holds its index, so these are the right samples and their original indices.
    assert all(numbers == originals for *_, originals, _, numbers in gathered)
    per_epoch = batches.steps_per_epoch(len(dataset), BATCH, LANES)
    if ranks == 1:
        first = sorted(number for step, *_, numbers in gathered if step < per_epoch for number in numbers)
        assert first == sorted(range(SIZE) if dataset is WHOLE else PART.base_indices(range(len(PART))))


@pytest.mark.parametrize("augment", [None, AUGMENT], ids=["plain", "augmented"])
@pytest.mark.parametrize("dataset", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 3)])
def test_evaluation_has_the_same_batches_from_rows_and_loader(
    make_config: MakeConfig, dataset: Any, augment: Any, rank: int, ranks: int
) -> None:
    config, here = make_config(batch_size=4, augment=augment), world_of(rank, ranks)
    gathered = measured_on(feed_of(dataset, config, here, "rows"))
    assert gathered == measured_on(feed_of(dataset, config, here, "loader"))
    assert all(numbers == originals for _, originals, _, numbers in gathered)


@pytest.mark.parametrize("way", ["rows", "loader"])
def test_images_are_augmented_by_the_users_index_and_the_epoch(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    seen: list[tuple[list[int], int]] = []

    def spy(self: Augment, images: torch.Tensor, indices: torch.Tensor, epoch: torch.Tensor) -> torch.Tensor:
        seen.append((indices.tolist(), epoch.item()))
        return images

    monkeypatch.setattr(Augment, "train", spy)
    feed = feed_of(PART, make_config(batch_size=BATCH, augment=AUGMENT), world_of(), way)
    lanes = trained_on(feed)
    assert seen == [(lane[-1], lane[0] // 2) for lane in lanes]
    assert {epoch for _, epoch in seen} == {0, 1, 2}


@pytest.mark.parametrize("way", ["rows", "loader"])
def test_evaluation_only_normalises(make_config: MakeConfig, way: str) -> None:
    feed = feed_of(WHOLE, make_config(batch_size=SIZE, augment=AUGMENT), world_of(), way)
    evaluated, _ = feed.evaluation_batches()
    [images] = [feed.evaluation_batch(one)[0] for one in evaluated]
    torch.testing.assert_close(images, (IMAGES / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("way", ["rows", "loader"])
def test_a_batch_that_is_a_dict_is_augmented_in_its_first_tensor(make_config: MakeConfig, way: str) -> None:
    feed = feed_of(
        Offered(), make_config(batch_size=4, augment={"normalize": {"mean": [0.5], "std": [1.0]}}), world_of(), way
    )
    [lane, *_] = feed.lanes(
        partial(LaneSampler, seed=0, size=SIZE, batch_size=4, steps=range(1), rank_lanes=RankLanes(1, 1, 0))
    )
    batch = feed.batch(feed.inputs(lane, 0))
    assert list(batch) == ["pixels", "labels"]
    assert batch["labels"].dtype == torch.int64
    torch.testing.assert_close(batch["pixels"], IMAGES[batch["labels"]] / 255 - 0.5)


class Offered(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": IMAGES[index], "labels": index}

    def as_tensors(self) -> dict[str, torch.Tensor]:
        return {"pixels": IMAGES, "labels": torch.arange(SIZE)}


@pytest.mark.parametrize("way", ["rows", "loader"])
def test_sample_is_a_batch_of_the_first_samples_as_in_evaluation(make_config: MakeConfig, way: str) -> None:
    feed = feed_of(PART, make_config(batch_size=4, augment=AUGMENT), world_of(), way)
    images, numbers = feed.sample()
    assert numbers.tolist() == PART.base_indices(range(4 if way == "rows" else 2))  # rows are cheap
    torch.testing.assert_close(images, (IMAGES[numbers] / 255 - 0.5) / 0.25)
    assert len(feed_of(SplitSubset(WHOLE, 0, range(1)), make_config(), world_of(), way).sample()[1]) == 1


@pytest.mark.parametrize("way", ["rows", "loader"])
def test_images_are_channels_last_where_the_model_is(make_config: MakeConfig, way: str) -> None:
    floats = TensorDataset(IMAGES.float(), torch.arange(SIZE))
    feed = feed_of(floats, make_config(batch_size=4), world_of(), way)
    feed.is_channels_last = True
    sampler = partial(LaneSampler, seed=0, size=SIZE, batch_size=4, steps=range(1), rank_lanes=RankLanes(1, 1, 0))
    lane = next(iter(feed.lanes(sampler)))
    assert feed.batch(feed.inputs(lane, 0))[0].is_contiguous(memory_format=torch.channels_last)
    evaluated, _ = feed.evaluation_batches()
    assert feed.evaluation_batch(next(iter(evaluated)))[0].is_contiguous(memory_format=torch.channels_last)


# --- feeds of a run -------------------------------------------------------------------------------------------------


def test_training_and_validation_share_the_rows_of_one_data_set(make_config: MakeConfig) -> None:
    parts = SplitSubset(WHOLE, 0, range(15)), SplitSubset(WHOLE, 0, range(15, SIZE))
    training, validation = make_feeds(*parts, make_config(), world_of())
    assert validation is not None
    assert training.rows is not None
    assert validation.rows is training.rows
    known = [training.original_indices(range(15)), validation.original_indices(range(8))]
    assert sorted([*known[0], *known[1]]) == list(range(SIZE))


def test_two_data_sets_have_separate_rows(make_config: MakeConfig) -> None:
    other = TensorDataset(IMAGES[:5], torch.arange(5))
    training, validation = make_feeds(WHOLE, other, make_config(), world_of())
    assert training.rows is not None
    assert validation is not None
    assert validation.rows is not None
    assert [len(feed.rows.tensors[0]) for feed in (training, validation)] == [SIZE, 5]
    training, validation = make_feeds(WHOLE, [1, 2], make_config(), world_of())
    assert validation is not None
    assert validation.rows is None
    training, validation = make_feeds(WHOLE, None, make_config(data_on_device=0), world_of())
    assert validation is None
    assert training.rows is None


# --- batches that a data set makes by itself ------------------------------------------------------------------------


class Finished(Dataset[Any]):
    """Returns finished batches in the given form."""

    def __init__(self, form: Callable[[list[int]], Any]) -> None:
        self.form = form

    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]) -> Any:
        return self.form(indices)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: SplitSubset(data, 0, range(6))], ids=["whole", "part"]
)
def test_a_tuple_or_a_dict_of_getitems_is_a_batch_already_and_a_list_is_collated(wrap: Any) -> None:
    def numbers(form: Callable[[list[int]], Any]) -> list[Any]:
        dataset = wrap(Finished(form))
        sampler = LaneSampler(seed=0, size=6, batch_size=3, steps=range(1), rank_lanes=RankLanes(1, 1, 0))
        [lane] = keyed_loader(dataset, sampler, seed=0, workers=0, world=world_of())
        [first, _] = evaluation_loader(dataset, batch_size=3, seed=0, workers=0, world=world_of())
        return [lane.data, first.data]

    for batch in numbers(lambda indices: (torch.tensor(indices), "whole")):
        assert type(batch) is tuple
        assert batch[0].shape == (3,)
        assert batch[1] == "whole"
    for batch in numbers(lambda indices: OrderedDict(x=torch.tensor(indices), note="whole")):
        assert batch["x"].shape == (3,)
        assert batch["note"] == "whole"
    for batch in numbers(lambda indices: [(index, torch.zeros(2)) for index in indices]):
        assert [part.shape for part in batch] == [(3,), (3, 2)]


# --- on the device -------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def test_every_tensor_of_a_batch_moves_and_everything_else_stays() -> None:
    tensor = torch.zeros(2)
    batch = {"a": tensor, "b": [tensor, "text"], "c": (tensor, 3), "d": Pair(tensor, None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "text"
    assert moved["c"][0].is_meta
    assert moved["c"][1] == 3
    assert moved["d"].left.is_meta
    assert moved["d"].right is None
    assert [type(value) for value in moved.values()] == [torch.Tensor, list, tuple, Pair]
    assert not tensor.is_meta


def test_original_indices_of_lists_and_of_rows(make_config: MakeConfig) -> None:
    by_loader, by_rows = (feed_of(PART, make_config(), world_of(), way) for way in ("loader", "rows"))
    assert by_loader.original_indices([3, 1]) == PART.base_indices([3, 1]) != [3, 1]
    assert by_rows.original_indices(torch.tensor([3, 1])) == [3, 1]
    assert feed_of(WHOLE, make_config(), world_of(), "loader").original_indices([3, 1]) == [3, 1]
    lane = Lane(0, 0, 2, 2, torch.tensor([3, 1]))
    assert by_rows.batch(by_rows.inputs(lane, 0))[1].tolist() == [3, 1]


# --- which tensor is the image, and whose it is -----------------------------------------------------------------------


def test_images_are_the_first_input_of_four_dimensions() -> None:
    features, images, masks = torch.zeros(2, 3), torch.ones(2, 1, 4, 4), torch.full((2, 1, 4, 4), 5.0)
    change = with_images((features, images, masks), lambda tensor: tensor * 2)
    assert [int(tensor.max()) for tensor in change] == [0, 2, 5]
    named = with_images({"labels": masks, "age": features, "pixels": images}, lambda tensor: tensor * 2)
    assert {key: int(tensor.max()) for key, tensor in named.items()} == {"labels": 5, "age": 0, "pixels": 2}
    assert int(with_images((masks,), lambda tensor: tensor * 2)[0].max()) == 10


def test_the_samples_of_two_lanes_of_a_stream_are_augmented_differently() -> None:
    options = {"model_fn": list, "dataset_fn": list, "loss_fn": "mse_loss", "augment": {"flip": "random"}}
    stream = StreamDataset(lambda: [(torch.zeros(1, 4, 4), 0)])
    feed = Feed(stream, build(options), world_of())
    first, second = (
        feed.inputs(Lane(0, lane, 2, 4, range(2), (torch.zeros(2, 1, 4, 4), torch.zeros(2))), 0).indices
        for lane in (0, 1)
    )
    assert first is not None
    assert second is not None
    assert not set(first.tolist()) & set(second.tolist())
