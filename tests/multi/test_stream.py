"""Iterable data sets on real ranks: what is refused, lengths that differ, and runs that are resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from paceline import Trainer, shard
from paceline.errors import ConfigError, RankFailed
from support.datasets import MapDataset, StreamDataset
from support.runs import events_of

SIZE, BATCH, LANES = 83, 3, 4  # 7 steps an epoch


class Blobs(IterableDataset):
    """Shuffled before it is shared, with noise after."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(1))
        order = list(range(SIZE))
        random.shuffle(order)
        for index in shard(order):
            yield x[index] + 0.1 * torch.randn(5), (x[index].sum() > 0).long()


def held_out() -> MapDataset:
    return MapDataset(10, lambda index: (torch.full((5,), float(index)), torch.tensor(index % 2)))


def normed_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model_fn": normed_net, "dataset_fn": Blobs, "loss_fn": nn.functional.cross_entropy, "batch_size": BATCH,
        "lanes": LANES, "num_epochs": 3, "threads": 1, "device": "cpu", "ema": 0.9, "log": {"every_steps": 1},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    }  # fmt: skip
    return Trainer(**{**defaults, **options})


def identity_of(result: Any) -> tuple[Any, ...]:
    steps = events_of(result.run_dir, "step")
    losses = [(event["step"], event["loss"]) for event in steps]
    return result.weights_sha256, result.ema_sha256, result.optimizer_sha256, result.history, result.samples, losses


# --- the managed loop -----------------------------------------------------------------------------------------------


def test_a_run_over_an_iterable_data_set_reports_what_is_known() -> None:
    result = trainer(procs=2, val_dataset_fn=held_out).start()
    assert (result.step, result.epoch, result.samples) == (21, 3, 3 * SIZE)
    assert [row["step"] for row in result.history] == [7, 14, 21]
    assert "val_loss" in result.metrics
    assert {(event["steps"], event["epochs"]) for event in events_of(result.run_dir, "step")} == {(None, 3)}
    assert events_of(result.run_dir, "warning") == []


@pytest.mark.parametrize(
    ("stopped_at", "then"), [(9, {"procs": 4}), (14, {"procs": 1}), (3, {"procs": 2, "workers": 2})]
)
def test_a_run_that_resumes_with_other_ranks_gives_the_uninterrupted_hash(
    stopped_at: int, then: dict[str, Any], tmp_path: Path
) -> None:
    whole = trainer(procs=1).start()
    run_dir = tmp_path / "run"

    def loss_until(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        flag = run_dir / "failed"
        saved = run_dir / "checkpoints" / f"step-{stopped_at:08d}"
        if saved.exists() and not flag.exists():
            flag.touch()
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    options: dict[str, Any] = {
        "run_dir": run_dir, "loss_fn": loss_until, "checkpoint": {"every_steps": stopped_at, "async": False},
        "max_restarts": 0,
    }  # fmt: skip
    with pytest.raises(RankFailed):
        trainer(procs=2, **options).start()
    resumed = trainer(resume="auto", **options, **then).start()
    assert [event["step"] for event in events_of(run_dir, "resumed")] == [stopped_at]
    assert identity_of(resumed) == identity_of(whole)
    texts = [event["text"] for event in events_of(run_dir, "warning") if "are read again" in event["text"]]
    assert [f"{stopped_at % 7} steps of epoch {stopped_at // 7 + 1}" in text for text in texts] == [True] * (
        stopped_at != 14
    )


def test_the_same_samples_on_every_rank_are_refused_with_the_fix() -> None:
    class Unshared(Blobs):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield from ((torch.full((5,), float(index)), torch.tensor(index % 2)) for index in range(SIZE))

    with pytest.raises(
        ConfigError, match=r"same samples for lane 0 and lane 1; .*yield from paceline\.shard\(samples\)"
    ):
        trainer(dataset_fn=Unshared, procs=2, lanes=2).start()
    assert trainer(dataset_fn=Unshared, procs=1, lanes=1, max_steps=2).start().step == 2


def test_a_lane_without_samples_is_the_same_error_at_any_number_of_ranks() -> None:
    class Short(Blobs):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            index, _ = shard()
            return iter(()) if index == 3 else super().__iter__()

    for procs in (1, 4):
        with pytest.raises(ConfigError, match=r"no samples for lane 3 of 4 in epoch 1"):
            trainer(dataset_fn=Short, procs=procs).start()


def test_a_schedule_with_an_end_needs_max_steps() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.name=cosine needs the number of steps.*set max_steps"):
        trainer(schedule={"name": "cosine"}, procs=1).start()


def test_an_iterable_data_set_is_not_evaluated() -> None:
    result = trainer(procs=1, num_epochs=1).start()
    with pytest.raises(ConfigError, match="the run has no validation data"):
        result.evaluate()


def test_replicas_are_checked_at_the_end() -> None:
    class Drifting(nn.Linear):
        """Changes its own bias on rank 1 in the last step."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == 14 and dist.get_rank() == 1:
                self.bias.data[0] += 1e-6
            return super().forward(x)

    with pytest.raises(RankFailed, match=r"after step 7 the weights of rank 1 differ from rank 0's"):
        trainer(model_fn=lambda: Drifting(5, 2), procs=2, num_epochs=1, ema=None).start()


# --- the user's own loop --------------------------------------------------------------------------------------------


def numbers(*lengths: int) -> StreamDataset:
    """Share k has `lengths[k]` numbers from 100 × k on; or, without lengths, every share its part of 61."""

    def samples() -> Iterator[torch.Tensor]:
        index, _ = shard()
        numbers = range(100 * index, 100 * index + lengths[index]) if lengths else shard(range(61))
        return (torch.tensor([float(number)]) for number in numbers)

    return StreamDataset(samples)


def record(model, train_loader, val_loader, device, num_epochs):
    """Trains, so that ranks wait for each other, and gives every rank's numbers of each epoch."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-6), []
    for _ in range(num_epochs):
        seen.append([])
        for x in train_loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            seen[-1] += x[:, 0].int().tolist()
    of_all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, seen)
    return of_all_ranks


def start_own_loop(dataset: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"batch_size": 4, "num_epochs": 2, "procs": 2}
    return Trainer(lambda: nn.Linear(1, 1), lambda: dataset, train_fn=record, **{**defaults, **options}).start()


def test_uneven_lengths_end_the_epoch_for_all_with_one_warning() -> None:
    result = start_own_loop(numbers(21, 9))
    assert result.value == [[list(range(12))] * 2, [list(range(100, 109))] * 2]
    assert (result.step, result.samples) == (6, 42)
    [warning] = events_of(result.run_dir, "warning")
    assert warning["text"].startswith(
        "epoch 1 ends after 3 batches, because rank 1 has no more samples; at least 4 samples"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_samples(workers: int) -> None:
    result = start_own_loop(numbers(), workers=workers, batch_size=61)
    for epoch in range(2):
        assert sorted(n for of_rank in result.value for n in of_rank[epoch]) == list(range(61))


def test_the_same_samples_on_every_rank_are_refused_in_an_own_loop() -> None:
    unshared = StreamDataset(lambda: (torch.tensor([float(number)]) for number in range(61)))
    with pytest.raises(
        ConfigError, match=r"same samples for shard 0 and shard 1; .*yield from paceline\.shard\(samples\)"
    ):
        start_own_loop(unshared)


def test_a_rank_without_samples_is_named_in_an_own_loop() -> None:
    with pytest.raises(ConfigError, match="no samples for rank 1 of 2"):
        start_own_loop(numbers(21, 0))
