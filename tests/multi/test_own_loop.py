"""The user's own loop on real ranks: the loaders, the return value, the errors."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Trainer
from paceline.checkpoint.weights import load_weights
from paceline.errors import ConfigError, PicklingError, RankFailed
from support.datasets import MapDataset
from support.models import PartlyUsed


def numbers(length: int) -> MapDataset:
    """Sample i is the number i, with one random number from each generator that augmentation uses."""
    return MapDataset(length, lambda index: (index, torch.rand(()).item(), np.random.rand()))


def record_samples(model, train_loader, val_loader, device, num_epochs):
    """Every rank's batches of each epoch, and of validation, on all ranks."""
    mine = [[(i.tolist(), t.tolist(), n.tolist()) for i, t, n in train_loader] for _ in range(num_epochs)]
    validation = [i.tolist() for i, _, _ in val_loader]
    of_all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, (mine, validation, len(train_loader)))
    return of_all_ranks


@pytest.mark.parametrize("procs", [1, 2, 4])
def test_every_sample_once_per_epoch_with_equally_many_batches_on_each_rank(procs: int) -> None:
    size = 61
    result = Trainer(
        model_fn=lambda: nn.Linear(1, 1), dataset_fn=lambda: numbers(size), train_fn=record_samples,
        batch_size=4, num_epochs=2, procs=procs, val_fraction=0.2,
    ).start()  # fmt: skip
    orders = []
    for epoch in range(2):
        batches = [[indices for indices, _, _ in training[epoch]] for training, _, _ in result.value]
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert all(1 <= len(batch) <= 4 for of_rank in batches for batch in of_rank)
        orders.append([i for of_rank in batches for batch in of_rank for i in batch])
    validation = [i for _, of_rank, _ in result.value for batch in of_rank for i in batch]
    assert len(validation) == round(size * 0.2)
    assert sorted(orders[0] + validation) == sorted(orders[1] + validation) == list(range(size))
    assert orders[0] != orders[1]
    assert [length for _, _, length in result.value] == [len(result.value[0][0][0])] * procs


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_differs_between_ranks_workers_and_epochs(workers: int) -> None:
    result = Trainer(
        model_fn=lambda: nn.Linear(1, 1), dataset_fn=lambda: numbers(48), train_fn=record_samples,
        batch_size=4, num_epochs=2, procs=2, workers=workers,
    ).start()  # fmt: skip
    draws = [
        (torch_draws, numpy_draws)
        for training, _, _ in result.value
        for epoch in training
        for _, torch_draws, numpy_draws in epoch
    ]
    for kind in (0, 1):
        drawn = [value for batch in draws for value in batch[kind]]
        assert len(set(drawn)) == len(drawn)


def test_fewer_samples_than_ranks_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"the validation data \(val_fraction=0.1; 0 leaves it out\) has 1 samples, fewer than the 2"
    ):
        Trainer(
            model_fn=lambda: nn.Linear(1, 1), dataset_fn=lambda: numbers(8), train_fn=record_samples, procs=2
        ).start()


def test_set_epoch_of_hand_written_loops_chooses_the_order() -> None:
    def twice_the_same(model, train_loader, val_loader, device, num_epochs):
        orders = []
        for _ in range(2):
            train_loader.sampler.set_epoch(5)
            orders.append([i for indices, _, _ in train_loader for i in indices.tolist()])
        return orders

    result = Trainer(lambda: nn.Linear(1, 1), lambda: numbers(30), train_fn=twice_the_same, procs=1).start()
    assert result.value[0] == result.value[1]


def half_used() -> nn.Module:
    return PartlyUsed(1, 1)


def line() -> MapDataset:
    return MapDataset(32, lambda index: (torch.tensor([index / 32.0]), torch.tensor([index / 16.0])))


def fit_line(model, train_loader, val_loader, device, num_epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


def leave_the_group(model, train_loader, val_loader, device, num_epochs):
    for x, _, _ in train_loader:
        model(x[:, None].float()).sum().backward()
    dist.destroy_process_group()  # as many examples end


def keep_the_loader(model, train_loader, val_loader, device, num_epochs):
    model.kept = iter(train_loader)
    threading.kept = model.kept  # beyond the end of everything
    next(model.kept)


def keep_the_loader_in_a_cycle(model, train_loader, val_loader, device, num_epochs):
    holder = SimpleNamespace(loader=train_loader, batches=iter(train_loader))
    holder.itself = holder
    next(holder.batches)


def keep_a_pool(model, train_loader, val_loader, device, num_epochs):
    threading.pool = multiprocessing.Pool(1)
    assert threading.pool.map(abs, [-1]) == [1]


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("train_fn", [leave_the_group, keep_the_loader, keep_the_loader_in_a_cycle, keep_a_pool])
def test_a_loop_that_does_not_clean_up_or_does_so_itself_ends_well(train_fn: Any, procs: int) -> None:
    result = Trainer(
        model_fn=lambda: nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        dataset_fn=lambda: numbers(24), train_fn=train_fn, batch_size=4, num_epochs=1, procs=procs, workers=1,
    ).start()  # fmt: skip
    assert result.load_model()[0].weight.shape == (4, 1)
    is_reported = "the weights of the ranks are not compared" in (result.run_dir / "events.jsonl").read_text()
    assert is_reported == (train_fn is leave_the_group and procs == 2)


def fit_past_the_wrapper(model, train_loader, val_loader, device, num_epochs):
    return fit_line(getattr(model, "module", model), train_loader, val_loader, device, num_epochs)


def freeze_and_fit_past_the_wrapper(*arguments):
    fit_past_the_wrapper(*arguments).requires_grad_(False)  # as many do before they save


@pytest.mark.parametrize("train_fn", [fit_past_the_wrapper, freeze_and_fit_past_the_wrapper])
def test_ranks_that_end_with_different_weights_have_no_result(train_fn: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model_fn = lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))  # noqa: E731
    with pytest.raises(RankFailed) as failed:
        Trainer(model_fn, line, train_fn=train_fn, batch_size=4, procs=2, num_epochs=1, run_dir=run).start()
    kept = run / "weights-rank-0.safetensors"
    assert "the weights of rank 1 differ from rank 0's, first in 0.weight; model.module(…) bypasses" in str(
        failed.value
    )
    assert f"rank 0's weights are in {kept}" in str(failed.value)
    assert not (run / "weights.safetensors").exists()
    assert not (run / "result.json").exists()
    load_weights(model_fn(), kept)


def test_a_rank_that_fails_is_named_while_the_others_wait_to_compare() -> None:
    def fail_on_one_rank(model, train_loader, val_loader, device, num_epochs):
        if dist.get_rank() == 1:
            raise ValueError("only here")

    with pytest.raises(RankFailed, match=r"rank 1 on .* failed[^?]*ValueError: only here"):
        Trainer(lambda: nn.Linear(1, 1), line, train_fn=fail_on_one_rank, batch_size=4, procs=2).start()


def test_statistics_and_frozen_parameters_may_differ_between_ranks() -> None:
    def fit(model, train_loader, val_loader, device, num_epochs):
        fit_line(model, train_loader, val_loader, device, num_epochs)
        model.module[2].weight.data += dist.get_rank()  # frozen
        statistics: list[Any] = [None, None]
        dist.all_gather_object(statistics, model.module[1].running_mean)
        return not torch.equal(*statistics)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).requires_grad_(False))

    assert Trainer(net, line, train_fn=fit, batch_size=4, procs=2, num_epochs=1).start().value is True


def test_unused_parameters_are_named_with_the_key_that_allows_them() -> None:
    with pytest.raises(RankFailed) as failed:
        Trainer(half_used, line, train_fn=fit_line, batch_size=4, procs=2).start()
    message = str(failed.value)
    assert "forgotten.weight, forgotten.bias" in message
    assert "find_unused_parameters: true" in message
    assert "used.weight" not in message.replace("forgotten", "").replace("Unused", "")
    Trainer(half_used, line, train_fn=fit_line, batch_size=4, procs=2, find_unused_parameters=True).start()


def test_start_twice_and_the_model_is_loaded_as_it_was_written() -> None:
    trainer = Trainer(lambda: nn.Linear(1, 1), line, train_fn=fit_line, batch_size=4, num_epochs=3, procs=2)
    first, second = trainer.start(), trainer.start()
    assert first.run_dir != second.run_dir
    assert first.weights_sha256 == second.weights_sha256
    assert type(first.value) is nn.Linear
    assert torch.equal(first.value.weight, second.load_model().weight)


def test_a_table_reaches_the_ranks_through_one_mapped_file() -> None:
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"x": np.arange(500_000.0), "y": np.arange(500_000.0) * 2})

    class Rows(Dataset):
        def __init__(self, df):
            self.df = df

        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.tensor([self.df.x[index]])

    def look(model, train_loader, val_loader, device, num_epochs):
        maps = Path("/proc/self/maps").read_text()
        values = train_loader.dataset.base.df
        values.loc[0, "x"] = -1.0  # a rank may write; the others and the caller do not see it
        job = next(Path("runs").rglob("job.bin"))
        mode = job.stat().st_mode & 0o777
        return {"mapped": "job.bin" in maps, "sum": float(values.y.sum()), "rows": len(values), "mode": mode}

    result = Trainer(lambda: nn.Linear(1, 1), Rows, table, look, procs=2).start()
    assert result.value == {"mapped": True, "sum": float(table.y.sum()), "rows": 500_000, "mode": 0o600}
    assert not (result.run_dir / "job.bin").exists()  # a copy of the data does not stay in every run folder
    assert table.x[0] == 0.0


def test_what_cannot_be_pickled_is_named_before_a_process_starts(tmp_path: Path) -> None:
    class Settings:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    cfg = Settings()

    def get_model() -> nn.Module:
        assert cfg.lock
        return nn.Linear(1, 1)

    with pytest.raises(PicklingError, match="model_fn → closure 'cfg' → attribute 'lock'"):
        Trainer(get_model, line, train_fn=fit_line, procs=2).start()
    assert not list(tmp_path.rglob("rank-*.log"))


def test_auto_restarts_a_failed_own_loop_in_its_folder_and_leaves_a_finished_one_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(model, train_loader, val_loader, device, num_epochs):
        if not (tmp_path / "seen").exists():
            (tmp_path / "seen").touch()
            raise ValueError("the first attempt fails")
        return "trained"

    trainer = Trainer(
        model_fn=lambda: nn.Linear(1, 1), dataset_fn=lambda: numbers(8), train_fn=train, batch_size=4, num_epochs=1,
        procs=1, val_fraction=0, run_dir=tmp_path / "mine", resume="auto",
    )  # fmt: skip
    with pytest.raises(RankFailed, match="the first attempt fails"):
        trainer.start()
    assert trainer.start().value == "trained"
    assert (
        "train_fn has no parameter `run`, so its state was not saved: it starts from the beginning"
        in capfd.readouterr().err
    )
    result = (tmp_path / "mine" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="contains a finished run"):
        trainer.start()
    assert (tmp_path / "mine" / "result.json").read_bytes() == result


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "loop",
    [{"train_fn": lambda model, *others: None}, {"loss_fn": lambda output, *batch: output.sum(), "val_fraction": 0}],
    ids=["own", "managed"],
)
def test_a_value_that_was_in_the_folder_before_is_not_executed(tmp_path: Path, loop: dict[str, Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/value.pkl").write_bytes(pickle.dumps(Touch(tmp_path / "executed")))
    dataset = [(torch.ones(1), torch.ones(1))] * 4
    result = Trainer(lambda: nn.Linear(1, 1), lambda: dataset, procs=1, run_dir=tmp_path / "run", **loop).start()
    assert result.value is None
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run/value.pkl").exists()


def test_accuracy_over_the_length_of_the_validation_data_is_right_for_the_share_of_each_rank() -> None:
    def train(model, train_loader, val_loader, device, num_epochs):
        seen = sum(len(batch) for batch, _ in val_loader)
        mine = torch.tensor([seen, len(val_loader.dataset), len(train_loader.dataset)])
        ranks = [torch.zeros_like(mine) for _ in range(2)]
        torch.distributed.all_gather(ranks, mine)
        return [rank.tolist() for rank in ranks]

    result = Trainer(
        lambda: torch.nn.Linear(1, 1), lambda: TensorDataset(torch.zeros(50, 1), torch.zeros(50)), train_fn=train,
        val_fraction=0.5, batch_size=4, procs=2, threads=1,
    ).start()  # fmt: skip
    assert result.value == [[12, 12, 25], [13, 13, 25]]
