"""Unusual loops of the user with `run`: left early, read again, resumed in odd places; each works or is refused."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exactness_cases import Images, conv_net
from torch import nn
from torch.nn import functional

from paceline import Result, Sum, Trainer
from paceline.errors import ConfigError, RankFailed, Stopped
from support.runs import warnings_in

STEPS = 5  # of an epoch: 80 samples, 4 lanes of 4


def start(train_fn: Callable[..., Any], procs: int = 1, **changes: Any) -> Result:
    defaults: dict[str, Any] = {
        "model_fn": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), "dataset_fn": Images,
        "val_dataset_fn": lambda: Images(21), "batch_size": 4, "lanes": 4, "num_epochs": 3, "threads": 1,
        "max_restarts": 0,
    }  # fmt: skip
    return Trainer(**{**defaults, **changes}, train_fn=train_fn, procs=procs).start()


def step_of(model: Any, run: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
    run.backward(functional.cross_entropy(model(x), y))
    return run.step(optimizer)


def resumed(train_fn: Callable[..., Any], later: int = 2, **changes: Any) -> tuple[Result, Result]:
    """An uninterrupted run, and one that is stopped by the function itself while the file `stop` exists."""
    whole = start(train_fn, run_dir="whole", **changes)
    Path("stop").touch()
    with pytest.raises(Stopped):
        start(train_fn, run_dir="parts", **changes)
    Path("stop").unlink()
    return whole, start(train_fn, procs=later, run_dir="parts", resume="auto", **changes)


def stop_at(run: Any, step: int) -> None:
    if Path("stop").exists() and run.step_number == step:
        os.kill(os.getpid(), signal.SIGTERM)


def test_max_steps_ends_within_an_epoch_and_more_epochs_than_planned_are_trained() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        return sum(step_of(model, run, optimizer, *batch) for _ in run.epochs(4) for batch in train_loader)

    assert start(train, max_steps=3).value == 3
    assert start(train, max_steps=STEPS + 2, procs=2).value == STEPS + 2
    assert start(train, num_epochs=2).value == 4 * STEPS


def test_batches_can_be_seen_again_after_they_were_trained_on() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)
            seen.append(run.sum(sum(len(y) for _, y in train_loader)))
        seen.append(run.sum(sum(len(y) for _, y in train_loader)))
        return seen, run.step_number

    for procs in (1, 2):
        assert start(train, procs, num_epochs=2).value == ([80, 80, 80], 2 * STEPS)


def refused(mistake: Callable[..., Any]) -> Callable[..., Any]:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                mistake(model, run, optimizer, x, y, train_loader)

    return train


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def cleared_between(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    optimizer.zero_grad()
    run.step(optimizer)


def other_model(model, run, optimizer, x, y, loader):
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    run.track(mine=optimizer)
    run.backward(loss_of(mine, x, y))
    run.step(optimizer)


def unnamed(model, run, optimizer, x, y, loader):
    run.track(optimizer)


def mean_and_sum(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    run.backward(Sum(loss_of(model, x, y), 3))


def nested(model, run, optimizer, x, y, loader):
    next(iter(loader))
    step_of(model, run, optimizer, x, y)


def two_styles(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    loss_of(model, x, y).backward()
    run.step(optimizer)


def untracked(model, run, optimizer, x, y, loader):
    step_of(model, run, torch.optim.SGD(model.parameters(), lr=0.1), x, y)


def untracked_plainly(model, run, optimizer, x, y, loader):
    loss_of(model, x, y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def wrapped(model, run, optimizer, x, y, loader):
    wrapped.model = wrapped.model or nn.parallel.DistributedDataParallel(model)
    step_of(wrapped.model, run, optimizer, x, y)


def detached(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y).detach())


def as_number(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y).item())


def nested_epochs(model, run, optimizer, x, y, loader):
    list(run.epochs(2))


def clipped_by_hand(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    run.step(optimizer)


def rate_of_each_batch(model, run, optimizer, x, y, loader):
    step_of(model, run, optimizer, x, y)
    optimizer.param_groups[0]["lr"] *= 0.9


def negative_norm(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    run.step(optimizer, clip_norm=-1)


wrapped.model = None


def no_step(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    if run.step_number % 2:
        run.step(optimizer)


def twice(model, run, optimizer, x, y, loader):
    step_of(model, run, optimizer, x, y)
    run.step(optimizer)


def by_closure(model, run, optimizer, x, y, loader):
    optimizer = torch.optim.LBFGS(model.parameters())
    run.track(lbfgs=optimizer)
    run.backward(loss_of(model, x, y))
    run.step(optimizer)


def accumulated(model, run, optimizer, x, y, loader):
    accumulated.batches += 1
    run.backward(loss_of(model, x, y))
    if accumulated.batches % 4 == 0:
        run.step(optimizer)


def left_out(model, run, optimizer, x, y, loader):
    left_out.batches += 1
    if left_out.batches != 3:
        step_of(model, run, optimizer, x, y)


accumulated.batches = left_out.batches = 0


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (mean_and_sum, "got a mean and a sum with its own count in one step"),
        (nested, "train_loader was iterated again within its own loop"),
        (two_styles, r"loss\.backward\(\) and run\.backward\(loss\) were both called"),
        (no_step, r"run\.backward\(loss\) was called in a batch, but run\.step\(optimizer\) was not"),
        (accumulated, "accumulate gradients over batches with lanes or global_batch_size"),
        (left_out, r"called for some batches of a step and not for others; .* with 0 \* loss"),
        (twice, "run.step was called twice for one batch"),
        (by_closure, "LBFGS several times"),
        (untracked, r"run\.step\(optimizer\) got an optimizer that is not tracked"),
        (untracked_plainly, r"optimizer\.step\(\) got an optimizer that is not tracked"),
        (wrapped, "has wrapped the model in DistributedDataParallel"),
        (detached, "a loss that depends on no trainable parameter"),
        (as_number, r"run\.backward\(loss\) got a float; pass a tensor"),
        (nested_epochs, r"run\.epochs was called within a loop over run\.epochs"),
        (clipped_by_hand, r"gradients were changed between run\.backward\(loss\) and run\.step\(optimizer\)"),
        (cleared_between, r"gradients were changed between run\.backward\(loss\) and run\.step\(optimizer\)"),
        (other_model, r"got an optimizer without any parameter of the model"),
        (unnamed, r"run\.track\(SGD\) needs a name for it in checkpoints; write run\.track\(optimizer=…\)"),
        (rate_of_each_batch, r"the learning rate changed between the batches of a step"),
        (negative_norm, "clip_norm=-1.* must be a number above 0"),
    ],
)
def test_loops_that_would_train_wrongly_are_refused(mistake: Callable[..., Any], message: str, procs: int) -> None:
    with pytest.raises(ConfigError, match=message):
        start(refused(mistake), procs)


def skips(run: Any, number: int) -> str:
    return "skip" if run.rank == 1 and number == 2 else ""


def leaves(run: Any, number: int) -> str:
    return "leave" if run.rank == 1 and number == 2 else ""


def gathers(run: Any, number: int) -> str:
    return "gather" if run.rank == 1 and number == 2 else ""


def returns(run: Any, number: int) -> str:
    return "return" if run.rank == 1 and number == 2 else ""


@pytest.mark.parametrize(
    ("choose", "place"),
    [
        (skips, "at the end of a batch without"),
        (leaves, "at the end of an epoch"),
        (returns, "at the end of train_fn"),
        (gathers, "in run.gather"),
    ],
)
def test_a_rank_that_takes_another_way_through_the_code_is_named_at_once(choose: Any, place: str) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for number, batch in enumerate(train_loader):
                way = choose(run, number)
                if way == "skip":
                    continue
                if way == "leave":
                    break
                if way == "return":
                    return
                if way == "gather":
                    run.gather(batch[1])
                step_of(model, run, optimizer, *batch)

    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"rank 1 is {place}.* while another rank is in a batch with run.backward"):
        start(train, procs=2, lanes=2, hang_timeout_s=200)
    assert time.monotonic() - began < 100  # not after the timeout


@pytest.mark.parametrize("procs", [1, 4])
def test_a_step_that_is_left_before_its_update_leaves_nothing_behind(procs: int) -> None:
    def leave(is_computed: bool) -> Callable[..., Any]:
        def train(model, train_loader, val_loader, device, num_epochs, run):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run.track(optimizer=optimizer)
            for _ in run.epochs(num_epochs):
                for x, y in train_loader:
                    if run.step_number % STEPS == 2:
                        if is_computed:
                            run.backward(functional.cross_entropy(model(x), y))
                        break
                    step_of(model, run, optimizer, x, y)

        return train

    computed, looked_at = (start(leave(each), procs, model_fn=conv_net) for each in (True, False))
    assert computed.weights_sha256 == looked_at.weights_sha256


def test_an_optimizer_that_steps_by_itself_is_restored_and_keys_without_effect_are_named() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                stop_at(run, STEPS + 2)

    whole, parts = resumed(train, later=1, lanes=1, ema=0.9, clip_norm=1.0)
    assert parts.weights_sha256 == whole.weights_sha256
    [warning] = warnings_in(whole.run_dir)
    assert warning == "ema=0.9 and clip_norm=1.0 have no effect without run.backward(loss) and run.step(optimizer)"


def test_a_metric_that_differs_between_ranks_is_reported() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)
            run.log(forgotten=float(run.rank), agreed=run.sum(1))

    result = start(train, procs=2)
    assert result.metrics["forgotten"] == 0
    [warning] = warnings_in(result.run_dir)
    assert warning.startswith("run.log(forgotten=…) after the batches of an epoch got different values on the ranks")


@pytest.mark.parametrize("procs", [1, 2])
def test_a_bad_update_counts_though_another_optimizer_has_a_good_one_after_it(procs: int) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[1], model[2]))
        run.track(first=first, second=second)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                run.backward(model[1](model[0](x)).sum() * float("nan"))
                run.step(first)
                run.backward(functional.cross_entropy(model[2](model[0](x)), y))
                run.step(second)

    two_layers = {"model_fn": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(36, 2)), "lanes": procs}
    with pytest.raises(RankFailed, match="nan_limit=3 steps in a row were not finite"):
        start(train, procs, nan_limit=3, **two_layers)


def test_a_group_that_is_added_later_is_summed_over_lanes_and_ranks() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        run.track(optimizer=optimizer)
        for epoch in run.epochs(num_epochs):
            if epoch == 1:
                optimizer.add_param_group({"params": model[2].parameters()})
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)
            for parameter in model[2].parameters():
                parameter.grad = None

    two_layers = {"model_fn": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 2))}
    assert len({start(train, procs, **two_layers).weights_sha256 for procs in (1, 2, 4)}) == 1


def test_metrics_after_a_loop_that_was_left_belong_to_the_epoch_and_agree_on_any_number_of_ranks() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                if step_of(model, run, optimizer, x, y):
                    if run.step_number % STEPS == 2:
                        model.eval()
                        within = run.sum(sum(int((model(a).argmax(1) == b).sum()) for a, b in val_loader))
                        model.train()
                    if run.step_number % STEPS == 3:
                        break
            model.eval()
            run.log(after=run.sum(sum(int((model(a).argmax(1) == b).sum()) for a, b in val_loader)), within=within)
            model.train()

    results = [start(train, procs, model_fn=conv_net) for procs in (1, 2, 4)]
    assert len({result.weights_sha256 for result in results}) == 1
    assert results[0].history == results[1].history == results[2].history
    assert set(results[0].metrics) == {"after", "within"}


def test_the_best_epoch_is_kept_though_its_last_step_is_saved_by_its_number() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for epoch in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)
            run.log(score=-epoch)

    best = {"metric": "score", "mode": "max"}
    result = start(train, checkpoint={"every_steps": STEPS, "keep": 1, "best": best}, procs=2)
    assert sorted(path.name for path in (result.run_dir / "checkpoints").glob("step-*")) == [
        f"step-{STEPS:08d}",
        f"step-{3 * STEPS:08d}",
    ]


def train_with_parts(model, train_loader, val_loader, device, num_epochs, run):
    """Weights outside the model, a scheduler made after track, plain values that change, layers that thaw."""
    scale = nn.Parameter(torch.ones((), device=device))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)
    run.track(optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    run.track(scheduler=scheduler)
    for epoch in run.epochs(num_epochs):
        if epoch == 1:
            model[1].bias.requires_grad_(True)
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x) * scale, y))
            if run.step(optimizer):
                scheduler.step()
                run.state.setdefault("losses", []).append(run.step_number)
                run.state["best"] = np.float64(run.step_number)
            stop_at(run, 2 * STEPS + 2)
    return scale.item(), run.state["losses"], scheduler.get_last_lr()


def test_all_parts_of_an_own_loop_are_restored() -> None:
    whole, parts = resumed(train_with_parts)
    assert parts.weights_sha256 == whole.weights_sha256
    assert parts.optimizer_sha256 == whole.optimizer_sha256
    assert parts.value == whole.value


@pytest.mark.parametrize("place", ["within an epoch", "at the last step of an epoch", "between epochs"])
def test_an_optimizer_of_each_epoch_and_two_loops_over_epochs_are_restored(place: str) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        rows = []
        for phase in range(2):
            for epoch in run.epochs(3):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                run.track(optimizer=optimizer)
                for batch in train_loader:
                    step_of(model, run, optimizer, *batch)
                    if place != "between epochs":
                        stop_at(run, 4 * STEPS + (2 if place == "within an epoch" else 0))
                if place == "between epochs":
                    stop_at(run, 4 * STEPS)
                rows.append((phase, epoch))
                if (phase, epoch) == (0, 1):
                    break
        return rows

    whole, parts = resumed(train, num_epochs=6)
    assert whole.value == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert parts.weights_sha256 == whole.weights_sha256
    assert parts.optimizer_sha256 == whole.optimizer_sha256
    assert parts.history == whole.history
    assert not warnings_in(whole.run_dir)


def test_a_scheduler_that_is_tracked_within_an_epoch_gives_the_rates_of_an_uninterrupted_run() -> None:
    """It computes each rate from the one before, so a rate that is restored twice shows."""

    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = None
        for _ in run.epochs(num_epochs):
            if optimizer is None:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * STEPS)
                run.track(optimizer=optimizer, scheduler=scheduler)
            for batch in train_loader:
                if step_of(model, run, optimizer, *batch):
                    scheduler.step()
                stop_at(run, 2)

    whole, parts = resumed(train, num_epochs=4)
    assert parts.weights_sha256 == whole.weights_sha256
    assert "was called within an epoch, so a run restores optimizer only if" in warnings_in(whole.run_dir)[0]


def test_a_stop_where_the_loop_is_left_resumes_after_the_epoch() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                if step_of(model, run, optimizer, *batch) and run.step_number % STEPS == 3:
                    stop_at(run, STEPS + 3)
                    break

    whole, parts = resumed(train, checkpoint={"every_steps": 3})
    assert parts.weights_sha256 == whole.weights_sha256
    assert parts.history == whole.history


class Follower(nn.Module):
    """Its frozen weights follow the trained ones in each forward pass, as the key encoder of MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(36, 2), nn.Linear(36, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * other.data * x.mean()
        return self.student(x) + self.teacher(x)


def test_frozen_weights_that_forward_moves_are_the_same_on_any_number_of_ranks() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)
                stop_at(run, STEPS + 2)

    whole, parts = resumed(train, model_fn=Follower)
    assert whole.weights_sha256 == parts.weights_sha256 == start(train, 4, model_fn=Follower).weights_sha256


def test_gradients_are_clipped_by_value_after_they_are_summed() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, moved = torch.optim.SGD(model.parameters(), lr=1.0), []
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                before = model[1].weight.detach().clone()
                run.backward(functional.cross_entropy(model(x), y))
                run.step(optimizer, clip_value=1e-3)
                moved.append((model[1].weight - before).abs().max().item())
        return max(moved)

    results = [start(train, procs) for procs in (1, 2, 4)]
    assert len({result.weights_sha256 for result in results}) == 1
    assert results[0].value == pytest.approx(1e-3, rel=1e-3)


def test_a_warm_up_that_is_tracked_within_the_first_epoch_resumes_with_its_rates() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, rates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        run.track(optimizer=optimizer)
        for epoch in run.epochs(num_epochs):
            if epoch == 0:
                warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=4)
                run.track(warm_up=warm_up)
            for batch in train_loader:
                if step_of(model, run, optimizer, *batch) and epoch == 0:
                    warm_up.step()
                rates.append(optimizer.param_groups[0]["lr"])
                stop_at(run, 2)
        return rates[-1]

    whole, parts = resumed(train)
    assert whole.value == parts.value == 0.1
    assert parts.weights_sha256 == whole.weights_sha256


class Pool:
    """Images that each rank has seen."""

    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.images = state["images"]


def test_a_tracked_object_that_differs_between_ranks_is_reported() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, pool, count = torch.optim.SGD(model.parameters(), lr=0.1), Pool(), Pool()
        run.track(optimizer=optimizer, pool=pool, count=count)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                pool.images.append(x)
                count.images.append(torch.tensor(run.step_number))
                step_of(model, run, optimizer, x, y)

    [warning] = warnings_in(start(train, procs=4).run_dir)
    assert warning.startswith("the state of pool, passed to run.track, differs between the ranks")


def test_a_loop_over_batches_of_its_own_is_reported() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        for _ in run.epochs(num_epochs):
            pass

    assert "does not iterate over train_loader" in warnings_in(start(train).run_dir)[0]


def test_an_average_that_is_moved_after_each_update_is_the_same_on_any_number_of_ranks() -> None:
    """An AveragedModel counts its updates in a buffer, and copies the statistics of BatchNorm."""

    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        run.track(optimizer=optimizer, average=average)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                if step_of(model, run, optimizer, *batch):
                    average.update_parameters(model)
        return average.n_averaged.item(), [float(each.double().sum()) for each in average.module.state_dict().values()]

    counts, sums = zip(*(start(train, procs, model_fn=conv_net).value for procs in (1, 2, 4)), strict=True)
    assert counts == (3 * STEPS,) * 3
    assert sums[0] == sums[1] == sums[2]


def test_logged_values_are_those_of_their_batch_and_count_once_for_each_update() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                run.log(bias=model[1].bias[:1].detach())
                if step_of(model, run, optimizer, *batch):
                    run.log(updates=run.step_number)

    flat = {"dataset_fn": lambda: Images(70)}  # the last step is short
    results = [start(train, procs, **flat) for procs in (1, 2, 4)]
    assert results[0].history == results[1].history == results[2].history


def normalized() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 2))


def test_a_look_at_the_first_batch_and_an_endless_iterator_do_no_harm() -> None:
    def endless(loader):
        while True:
            yield from loader

    def train(model, train_loader, val_loader, device, num_epochs, run):
        x, _ = next(iter(train_loader))
        with torch.no_grad():
            shape = model.eval()(x).shape
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        batches = endless(train_loader)
        for _ in run.epochs(num_epochs):
            for _ in range(len(train_loader)):
                step_of(model, run, optimizer, *next(batches))
                stop_at(run, STEPS + 2)
        return tuple(shape)

    def plainly(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    def looking_and_leaving(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        model(next(iter(train_loader))[0])  # in training mode, which moves the statistics of BatchNorm
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                loss = functional.cross_entropy(model(x), y)
                if run.step_number == 2:  # after a forward pass in the step that follows
                    break
                run.backward(loss)
                run.step(optimizer)

    whole = start(train, procs=2, model_fn=normalized)
    assert whole.value == (4, 2)
    assert whole.weights_sha256 == start(plainly, model_fn=normalized).weights_sha256
    assert not warnings_in(whole.run_dir)
    assert len({start(looking_and_leaving, procs, model_fn=normalized).weights_sha256 for procs in (1, 2)}) == 1


def test_batches_that_are_read_before_the_epochs_do_not_count_as_training() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        next(iter(train_loader))
        sum(x.sum() for x, _ in train_loader)
        scale = torch.rand(()).item()  # equal on any number of ranks, though they have read other batches
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                run.backward(functional.cross_entropy(model(x), y))
                run.step(optimizer)
                stop_at(run, STEPS + 2)
        return run.step_number, run.sum(scale) / run.world_size

    whole, parts = resumed(train)
    assert whole.value == (3 * STEPS, start(train, procs=4).value[1])
    assert parts.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("make", [lambda: print, threading.Lock], ids=["a function", "what cannot be copied"])
def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step(make: Callable[[], Any]) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        run.state["thing"] = make()
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    with pytest.raises(ConfigError, match=r"run\.state cannot be in a checkpoint"):
        start(train)


def test_an_own_loop_does_not_start_without_space_for_its_checkpoints() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        raise AssertionError("it has started")

    def model_on_a_full_disk() -> nn.Module:
        shutil.disk_usage = lambda path: SimpleNamespace(free=100)  # in the process of this rank
        return nn.Linear(36, 2)

    with pytest.raises(ConfigError, match="two checkpoints need"):
        start(train, model_fn=model_on_a_full_disk)


def test_layers_with_shared_weights_under_reentrant_checkpointing_are_summed_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.flatten(1))
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.shared, x, use_reentrant=True).relu()
            return self.last(x)

    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    assert len({start(train, procs, model_fn=Twice).weights_sha256 for procs in (1, 2, 4)}) == 1


class Late(nn.Module):
    """Creates a buffer in the first forward pass: a cache, or a mean that each forward pass changes."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.layer, self.changes = nn.Linear(36, 2), changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.flatten(1))
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        if self.changes:
            self.late.lerp_(found.detach().mean(0), 0.1)
        return found * self.late


@pytest.mark.parametrize("procs", [1, 4])
def test_a_buffer_that_is_created_late_and_changes_is_refused(procs: int) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    start(train, procs, model_fn=lambda: Late(changes=False), val_dataset_fn=None, val_fraction=0)
    with pytest.raises((ConfigError, RankFailed), match="the model creates late in its first forward pass"):
        start(train, procs, model_fn=lambda: Late(changes=True), val_dataset_fn=None, val_fraction=0)


def test_an_epoch_that_was_left_early_counts_as_done() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, counted = torch.optim.SGD(model.parameters(), lr=0.1), []
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            counted.append((run.epochs_done, run.step_number))
            for batch in train_loader:
                if step_of(model, run, optimizer, *batch) and run.step_number % STEPS == 2:
                    break
        return counted

    assert start(train, procs=2).value == [(0, 0), (1, STEPS), (2, 2 * STEPS)]
