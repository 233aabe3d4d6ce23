"""The managed loop on real ranks, against a plain loop written here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Sum, Trainer, indices_at
from paceline.errors import ConfigError, RankFailed
from support.datasets import MapDataset, signed
from support.models import PartlyUsed
from support.runs import events_of

SIZE, BATCH, LANES, LR = 45, 4, 4, 0.05


def blobs() -> TensorDataset:
    return signed(SIZE, 5, seed=1)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def start(**options: Any) -> Any:
    defaults = {
        "model_fn": small_net, "dataset_fn": blobs, "loss_fn": nn.functional.cross_entropy, "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": LR}, "batch_size": BATCH, "lanes": LANES, "num_epochs": 2, "val_fraction": 0,
        "threads": 1,
    }  # fmt: skip
    return Trainer(**{**defaults, **options}).start()


def plain_training(epochs: int, **clip: float) -> nn.Module:
    """One process, no DDP, no lanes: each step takes the next LANES × BATCH samples of the epoch's order at once."""
    from paceline.data.seeding import seed_generators

    seed_generators(0, "model")
    model = small_net()
    data = blobs()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for epoch in range(epochs):
        order = torch.from_numpy(indices_at(seed=0, epoch=epoch, size=SIZE, positions=range(SIZE)))
        for chosen in order.split(LANES * BATCH):
            x, y = data[chosen]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip["clip_norm"])
            optimizer.step()
    return model


def assert_close(left: nn.Module, right: nn.Module) -> None:
    torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("procs", [1, 2, 4])
def test_any_number_of_ranks_computes_what_a_plain_loop_computes(procs: int) -> None:
    # 45 samples in steps of 16: the last step has 13, which four lanes share as 4, 3, 3, 3.
    result = start(procs=procs)
    assert_close(result.load_model(), plain_training(epochs=2))
    assert (result.step, result.epoch, result.world_size, result.lanes) == (6, 2, procs, LANES)


def by_name() -> TensorDataset:
    """Numbers classes as many data sets do, by the order of a set."""
    names = [f"class {n % 7}" for n in range(SIZE)]
    number = {name: place for place, name in enumerate(set(names))}
    return TensorDataset(blobs().tensors[0], torch.tensor([number[name] for name in names]))


def test_a_set_of_words_has_one_order_in_all_processes() -> None:
    options: dict[str, Any] = {"dataset_fn": by_name, "model_fn": lambda: nn.Linear(5, 7), "val_fraction": 0.3}
    runs = [start(**options, procs=1), start(**options, procs=2)]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert runs[0].evaluate() == runs[1].evaluate() == runs[0].metrics


def test_batchnorm_trains_where_one_sample_would_be_left() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    assert SIZE % (11 * 4) == 1
    one, two = (start(model_fn=net, batch_size=11, lanes=4, procs=procs) for procs in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert one.samples == 2 * SIZE


def net_from_file(path: Path, *, is_mapped: bool) -> nn.Module:
    """Its weights are those of a file, and stay there at odd addresses if they are mapped."""
    model, content = small_net(), np.memmap(path, dtype=np.float32, mode="c")
    for parameter in model.parameters():
        place, content = content[1 : 1 + parameter.numel()], content[1 + parameter.numel() :]
        mapped = torch.from_numpy(place).view(parameter.shape)
        parameter.data = mapped if is_mapped else mapped.clone()
    return model


def test_weights_mapped_from_a_file_train_to_the_same_bits(tmp_path: Path) -> None:
    # Some processors multiply a single sample by weights at odd addresses with other last bits.
    path = tmp_path / "weights"
    path.write_bytes(torch.randn(1000, generator=torch.Generator().manual_seed(2)).numpy().tobytes())
    runs = [
        start(model_fn=net_from_file, model_args={"path": path, "is_mapped": is_mapped}, batch_size=1, procs=procs)
        for is_mapped, procs in ((False, 1), (True, 1), (True, 2))
    ]
    assert len({run.weights_sha256 for run in runs}) == 1


class Batches(Dataset[Any]):
    """Gives finished batches, at round addresses or at odd ones."""

    def __init__(self, *, shift: int) -> None:
        self.x, self.y = blobs().tensors
        self.shift = shift

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, indices: list[int]) -> Any:
        x = self.x[indices]
        memory = torch.empty(x.numel() + self.shift)
        return memory[self.shift :].view(x.shape).copy_(x), self.y[indices]


def test_the_address_of_a_batch_changes_no_bit() -> None:
    runs = [start(dataset_fn=Batches, dataset_args={"shift": shift}, procs=1) for shift in (0, 1, 2, 4)]
    assert len({run.weights_sha256 for run in runs}) == 1


class RandomFeatures(nn.Module):
    """Holds numbers that are drawn once and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(5, 8), persistent=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head((x @ self.directions).cos())


def test_what_a_model_draws_and_does_not_save_is_the_same_when_it_is_used() -> None:
    result = start(model_fn=RandomFeatures, procs=1, val_fraction=0.2)
    before = torch.random.get_rng_state()
    x, y = blobs().tensors
    loss = nn.functional.cross_entropy(result.model(x), y)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert result.evaluate() == result.metrics
    assert result.evaluate(df=None, procs=2) == result.metrics
    again = result.load_model()
    assert not again.training
    assert loss == nn.functional.cross_entropy(again(x), y)


class Wrapped(nn.Module):
    """What `from_pretrained` gives, which is in evaluation mode, in a module that is not."""

    def __init__(self, dropout: float = 0.4, *, is_training: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout), nn.Linear(8, 2)).train(is_training)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def test_a_model_in_evaluation_mode_is_trained_like_any_other_from_the_first_step(tmp_path: Path) -> None:
    expected = start(model_fn=Wrapped, model_args={"is_training": True}, procs=2, val_fraction=0.2)
    whole = start(model_fn=Wrapped, procs=1, val_fraction=0.2)
    assert whole.weights_sha256 == expected.weights_sha256
    assert whole.weights_sha256 != start(model_fn=Wrapped, model_args={"dropout": 0.0}, val_fraction=0.2).weights_sha256
    options: dict[str, Any] = {"model_fn": Wrapped, "val_fraction": 0.2, "run_dir": str(tmp_path / "run")}
    start(**options, max_steps=4)  # in the second epoch, after an evaluation
    assert start(**options, resume="auto").weights_sha256 == whole.weights_sha256


def test_fewer_samples_than_lanes_in_the_last_step_count_once() -> None:
    results = [start(procs=procs, lanes=4, batch_size=11, num_epochs=1) for procs in (1, 4)]
    assert results[0].step == 2  # 44 samples, then a single one for four lanes
    assert_close(results[0].load_model(), results[1].load_model())


def test_clipping_is_by_the_norm_of_the_whole_step() -> None:
    assert_close(start(procs=2, clip_norm=0.1).load_model(), plain_training(epochs=2, clip_norm=0.1))


def test_sum_and_count_losses_are_weighted_by_what_they_count() -> None:
    def weighted(output: torch.Tensor, target: torch.Tensor) -> Sum:
        weights = 1.0 + 2.0 * target
        return Sum((nn.functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())

    one, two = start(procs=1, loss_fn=weighted), start(procs=2, loss_fn=weighted)
    assert_close(one.load_model(), two.load_model())
    # A single lane that holds the whole step divides by the same count by itself.
    whole = start(
        procs=1, lanes=1, batch_size=LANES * BATCH, loss_fn=lambda o, t: weighted(o, t)[0] / weighted(o, t)[1]
    )
    assert_close(one.load_model(), whole.load_model())


def test_the_schedule_moves_the_learning_rate() -> None:
    result = start(procs=1, schedule={"name": "cosine", "warmup_steps": 2}, log={"every_steps": 1})
    rates = [event["lr"] for event in events_of(result.run_dir, "step")]
    cosine = [LR * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert rates == pytest.approx([LR / 2, LR, *cosine])


def test_optimizer_fn_gets_the_model() -> None:
    result = start(procs=1, optimizer=None, optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=LR))
    assert_close(result.load_model(), plain_training(epochs=2))


class Lookahead(torch.optim.Optimizer):
    """Every second step, the weights go back halfway to slow ones; groups and state are its base's, as in timm."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        for group in self.param_groups:
            group["looked"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            group["looked"] += 1
            for parameter in group["params"] if group["looked"] % 2 else []:
                slow = self.base.state[parameter].setdefault("slow", parameter.clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


def test_a_run_with_an_inner_optimizer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": None, "optimizer_fn": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=LR)),
        "schedule": {"name": "constant", "warmup_steps": 5},
    }  # fmt: skip
    whole = start(**options, procs=1)
    options["run_dir"] = str(tmp_path / "run")
    start(**options, procs=2, max_steps=3)
    assert start(**options, procs=1, resume="auto").weights_sha256 == whole.weights_sha256


class Unfreezing(nn.Module):
    """Trains its first layer from its third forward in training, as gradual unfreezing does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8).requires_grad_(False), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += self.training
        self.first.requires_grad_(self.calls > 2)
        return self.last(self.first(x))


@pytest.mark.parametrize("procs", [1, 2])
def test_a_parameter_that_becomes_trainable_ends_the_run_at_any_number_of_ranks(procs: int) -> None:
    with pytest.raises(ConfigError, match=r"first\.weight was frozen when the run started .* in model_fn"):
        start(
            model_fn=Unfreezing, lanes=2, procs=procs, optimizer=None,
            optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=LR),
        )  # fmt: skip


@pytest.mark.parametrize("procs", [1, 4])
def test_evaluation_counts_each_sample_once(procs: int) -> None:
    def indexed() -> MapDataset:
        """The "metric" below returns each sample's index, so the mean shows which were counted."""
        return MapDataset(61, lambda index: (torch.ones(1), torch.tensor(float(index))))

    result = start(
        model_fn=lambda: nn.Linear(1, 1), dataset_fn=indexed, val_dataset_fn=indexed, val_fraction=None, procs=procs,
        loss_fn=lambda output, target: output.square().mean(), num_epochs=1,
        metrics={"index": lambda output, target: target.mean(), "many": lambda output, target: (target.sum(), 1)},
    )  # fmt: skip
    assert result.metrics["index"] == sum(range(61)) / 61
    assert result.metrics["many"] == sum(range(61)) / 16  # 61 samples are 16 batches of at most four


def test_numbers_are_equal_to_the_digit_at_one_and_two_ranks() -> None:
    # Two lanes: the sum of two terms does not depend on their order.
    options: dict[str, Any] = {"lanes": 2, "val_fraction": 0.3, "num_epochs": 3}
    one, two = start(procs=1, **options), start(procs=2, **options)
    assert one.history == two.history
    assert one.weights_sha256 == two.weights_sha256
    assert [row["epoch"] for row in one.history] == [1, 2, 3]
    assert set(one.history[0]) == {"epoch", "step", "train_loss", "val_loss", "accuracy"}
    assert one.metrics == {key: one.history[-1][key] for key in ("val_loss", "accuracy")}


def test_max_steps_ends_in_the_middle_of_an_epoch_with_an_evaluation() -> None:
    result = start(procs=1, max_steps=4, val_fraction=0.3, lanes=1)
    assert result.step == 4
    assert [row["step"] for row in result.history] == [4]


def test_batchnorm_statistics_are_those_of_lane_0_on_every_number_of_ranks() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))

    states = [start(model_fn=normed, procs=procs, val_fraction=0.3).load_model().state_dict() for procs in (1, 2, 4)]
    for state in states[1:]:
        torch.testing.assert_close(dict(state), dict(states[0]), rtol=1e-5, atol=1e-6)
    assert states[0]["1.num_batches_tracked"] == 4


def test_unused_parameters_are_named_in_the_step_they_are_unused() -> None:
    options: dict[str, Any] = {"model_fn": PartlyUsed, "model_args": {"inputs": 5, "outputs": 2}, "procs": 2}
    with pytest.raises(RankFailed, match=r"forgotten\.weight, forgotten\.bias in this step"):
        start(**options)
    assert start(**options, find_unused_parameters=True).step == 6


def test_more_ranks_than_lanes_are_refused_with_the_most_that_work() -> None:
    with pytest.raises(Exception, match=r"lanes=3 cannot be split over 4 ranks.*at most --procs 3"):
        start(lanes=3, procs=4)


def test_batches_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch is a Tensor; each sample .* \(.*test_managed_loop\.py:\d+\)$"):
        start(dataset_fn=lambda: torch.randn(16, 5), procs=1)


def test_a_step_in_which_nothing_is_counted_changes_nothing() -> None:
    result = start(procs=2, loss_fn=lambda output, target: (output.sum() * 0, 0), num_epochs=1)
    assert all(torch.isfinite(parameter).all() for parameter in result.load_model().parameters())


def test_dicts_are_called_by_name_with_their_labels_as_target() -> None:
    def named_samples() -> MapDataset:
        data = blobs()
        return MapDataset(SIZE, lambda index: dict(zip(("features", "labels"), data[index], strict=True)))

    class NamedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.net(features)

    named, pairs = start(procs=1, model_fn=NamedNet, dataset_fn=named_samples), start(procs=1)
    assert named.history == pairs.history
