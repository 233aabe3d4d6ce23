"""The keys about data on real ranks: collators of transformers, weighted sampling and orders of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from exactness_cases import ODD, Images, conv_net, masked, two_random_halves
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline import Trainer, shard
from paceline.errors import ConfigError, Stopped
from support.datasets import StreamDataset

WORDS = 20


def make_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *map(str, range(WORDS))])}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")),
        pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip


class Sentences(Dataset[dict[str, Any]]):
    """Lists of words of different lengths; the label is whether the first word is small."""

    def __init__(self, size: int = 41, has_labels: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, 9, (size,), generator=generator).tolist()
        self.words = [torch.randint(3, WORDS, (length,), generator=generator).tolist() for length in lengths]
        self.has_labels = has_labels

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        sample = {"input_ids": words, "attention_mask": [1] * len(words)}
        return {**sample, "label": int(words[0] < 10)} if self.has_labels else sample


class Reader(nn.Module):
    """Means of word vectors to two classes, or to a word for each place."""

    def __init__(self, per_word: bool = False) -> None:
        super().__init__()
        self.words, self.per_word = nn.Embedding(WORDS + 3, 8), per_word
        self.last = nn.Linear(8, WORDS + 3 if per_word else 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        vectors = self.words(input_ids) * attention_mask[..., None]
        mean = vectors.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None]
        output: torch.Tensor = self.last(vectors + mean if self.per_word else mean[:, 0])
        return output


def of_words(output: torch.Tensor, target: torch.Tensor) -> paceline.Sum:
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return paceline.Sum(total, (target != -100).sum())


def padding() -> dict[str, Any]:
    collator = pytest.importorskip("transformers").DataCollatorWithPadding(make_tokenizer())
    return {
        "model_fn": Reader, "dataset_fn": Sentences, "collate_fn": collator,
        "loss_fn": nn.functional.cross_entropy, "metrics": ["accuracy"],
    }  # fmt: skip


def masking() -> dict[str, Any]:
    collator = pytest.importorskip("transformers").DataCollatorForLanguageModeling(
        make_tokenizer(), mlm_probability=0.5
    )
    return {
        "model_fn": lambda: Reader(per_word=True), "dataset_fn": lambda: Sentences(has_labels=False),
        "collate_fn": collator, "loss_fn": of_words,
    }  # fmt: skip


def start(options: dict[str, Any], **changed: Any) -> Any:
    defaults: dict[str, Any] = {
        "batch_size": 3, "lanes": 4, "num_epochs": 2, "threads": 1, "device": "cpu", "val_fraction": 0.2,
    }  # fmt: skip
    return Trainer(**{**defaults, **options, **changed}).start()


def outcome(result: Any) -> tuple[Any, ...]:
    return result.weights_sha256, result.history


@pytest.mark.parametrize("make", [padding, masking])
def test_collators_of_transformers_give_one_hash_at_any_number_of_ranks_and_workers(make: Any) -> None:
    alone = start(make(), procs=1)
    assert outcome(start(make(), procs=2, workers=2)) == outcome(alone)
    assert outcome(start(make(), procs=4, seed=1)) != outcome(alone)
    assert alone.evaluate(procs=2) == alone.metrics


def test_masks_of_an_iterable_data_set_do_not_depend_on_ranks_and_workers() -> None:
    data = Sentences(has_labels=False)
    options = {**masking(), "dataset_fn": lambda: StreamDataset(lambda: shard(data[n] for n in range(len(data))))}
    alone = start(options, procs=1)
    assert outcome(start(options, procs=2)) == outcome(start(options, procs=2, workers=2)) == outcome(alone)


def test_predictions_use_the_collate_fn() -> None:
    result = start(padding(), procs=2)
    model = result.load_model().eval()
    data = Sentences()
    with torch.no_grad():
        words = [torch.tensor([data.words[index]]) for index in range(len(data))]
        expected = torch.cat([model(each, torch.ones_like(each)) for each in words])
    predictions = result.predict(procs=2)
    assert predictions.shape == (8, 2)
    assert all(torch.isclose(expected, row).all(1).any() for row in predictions)


def test_the_users_own_loop_gets_the_batches_of_the_collate_fn(tmp_path: Path) -> None:
    def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> list[list[str]]:
        return [sorted(batch) for loader in (train_loader, val_loader) for batch in loader]

    options = {key: value for key, value in padding().items() if key not in ("loss_fn", "metrics")}
    keys = start({**options, "train_fn": train, "lanes": None}, procs=2).value
    assert {tuple(batch) for batch in keys} == {("attention_mask", "input_ids", "labels")}


# --- weights and orders ---------------------------------------------------------------------------------------------

BY_WEIGHT = {
    "dataset_fn": lambda: Images(ODD, augment=True), "val_dataset_fn": None, "val_fraction": 0.2,
    "sample_weights": lambda dataset: 1 + 3.0 * dataset.labels,
}  # fmt: skip
BY_ORDER = {"order_fn": two_random_halves}


@pytest.mark.parametrize(("before", "after", "stop_at"), [(1, 4, 4), (4, 2, 11), (2, 1, 8)])
@pytest.mark.parametrize("keys", [BY_WEIGHT, BY_ORDER], ids=["weights", "order_fn"])
def test_a_stopped_and_resized_run_has_the_bits_of_an_uninterrupted_one(
    keys: dict[str, Any], before: int, after: int, stop_at: int
) -> None:
    class StopOnce(paceline.Callback):
        def on_step(self, run: paceline.Run, metrics: Any) -> None:
            if run.step_number == stop_at and before == run.world_size:
                run.stop("a test")

    whole = faults.start(**keys, procs=2, run_dir="whole")
    with pytest.raises(Stopped):
        faults.start(**keys, procs=before, callbacks=[StopOnce()])
    resumed = faults.start(**keys, procs=after, resume="auto", callbacks=[StopOnce()])
    assert [event["step"] for event in faults.events("resumed")] == [stop_at + 1]  # the request takes one step
    assert faults.outcome(resumed) == faults.outcome(whole)


def test_an_order_that_differs_between_ranks_is_refused_on_all_of_them() -> None:
    def by_rank(epoch: int, size: int) -> Any:
        return [torch.distributed.get_rank()] * size

    with pytest.raises(ConfigError, match="order_fn returns different orders on different ranks; compute it from its"):
        faults.start(procs=2, order_fn=by_rank)


def test_weights_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    def by_rank(dataset: Any) -> Any:
        return [1.0 + torch.distributed.get_rank()] + [1.0] * (len(dataset) - 1)

    with pytest.raises(
        ConfigError, match="sample_weights differ between the ranks; compute them only from the data set"
    ):
        faults.start(procs=2, sample_weights=by_rank)


def test_a_run_without_its_result_is_finished_with_orders_for_its_epochs_alone() -> None:
    orders = [list(range(ODD)), list(range(ODD))[::-1]]
    keys: dict[str, Any] = {"num_epochs": 2, "order_fn": lambda epoch, size: orders[epoch]}
    whole = faults.start(**keys)
    Path("run/result.json").unlink()
    assert faults.outcome(faults.start(**keys, resume="auto")) == faults.outcome(whole)


def test_the_users_own_loop_draws_by_weights_and_follows_an_order() -> None:
    def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> list[list[int]]:
        seen = [[int(number) for batch, _ in train_loader for number in batch] for _ in range(2)]
        return [sorted(first + second) for first, second in zip(*gather(seen), strict=True)]

    def gather(mine: Any) -> list[Any]:
        parts: list[Any] = [None] * 2
        torch.distributed.all_gather_object(parts, mine)
        return parts

    options = {
        "model_fn": lambda: nn.Linear(1, 1), "train_fn": train, "procs": 2, "threads": 1, "batch_size": 4,
        "dataset_fn": lambda: TensorDataset(torch.arange(20.0), torch.zeros(20)), "val_fraction": 0,
    }  # fmt: skip
    drawn = Trainer(**options, sample_weights=[0.0] * 15 + [1.0] * 5).start().value
    assert [set(epoch) for epoch in drawn] == [{15, 16, 17, 18, 19}] * 2
    assert drawn[0] != drawn[1]
    ordered = Trainer(**options, order_fn=lambda epoch, size: [epoch] * size).start().value
    assert ordered == [[0] * 20, [1] * 20]


@pytest.mark.parametrize("keys", [BY_WEIGHT, BY_ORDER, {"collate_fn": masked}], ids=["weights", "order_fn", "masks"])
def test_the_users_own_loop_with_run_has_one_hash_with_each_key(keys: dict[str, Any]) -> None:
    def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for images, labels in train_loader:
                run.backward(nn.functional.cross_entropy(model(images), labels))
                run.step(optimizer)

    options: dict[str, Any] = {
        "model_fn": conv_net, "dataset_fn": lambda: Images(ODD, augment=True), "val_dataset_fn": lambda: Images(61),
        "train_fn": train, "batch_size": 3, "global_batch_size": 12, "num_epochs": 2, "threads": 1,
    }  # fmt: skip
    hashes = {Trainer(**{**options, **keys}, procs=procs).start().weights_sha256 for procs in (1, 4)}
    assert len(hashes) == 1
    assert hashes != {Trainer(**options, procs=2).start().weights_sha256}


def test_a_global_batch_size_fixes_the_lanes_at_any_number_of_ranks() -> None:
    options = {"lanes": None, "global_batch_size": 12, "batch_size": 3}
    by_lanes = faults.start(procs=1, run_dir="lanes")
    assert faults.outcome(faults.start(**options, procs=2)) == faults.outcome(by_lanes)
    assert paceline.load("run", trust=True).lanes == 4
    with pytest.raises(
        ConfigError,
        match="global_batch_size=24 gives lanes=8 but the run started with lanes=4; omit global_batch_size",
    ):
        faults.start(**{**options, "global_batch_size": 24}, procs=2, resume="run")
    with pytest.raises(ConfigError, match="lanes=4 cannot be split over 5 ranks"):
        faults.start(**options, procs=5, run_dir="third")


@pytest.mark.parametrize("key", ["sample_weights", "order_fn"])
def test_an_iterable_data_set_is_refused(key: str) -> None:
    options = {"dataset_fn": lambda: StreamDataset(lambda: iter(())), key: lambda *arguments: None}
    with pytest.raises(
        ConfigError, match=f"{key} needs a data set with a length; order the samples of an iterable data set"
    ):
        faults.start(**options)
