"""Unusual own loops with `run`: left early, read again, resumed in odd places; each works or is refused."""

from __future__ import annotations

import os
import shutil
import signal
import threading
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
from paceline.errors import ConfigError, Stopped
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
        return sum(step_of(model, run, optimizer, *batch) for _ in run.epochs(4) for batch in train_loader)

    assert start(train, max_steps=3).value == 3
    assert start(train, max_steps=STEPS + 2, procs=2).value == STEPS + 2
    assert start(train, num_epochs=2).value == 4 * STEPS


def test_batches_can_be_seen_again_after_they_were_trained_on() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
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
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                mistake(model, run, optimizer, x, y, train_loader)

    return train


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


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


def no_step(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    if run.step_number % 2:
        run.step(optimizer)


def twice(model, run, optimizer, x, y, loader):
    step_of(model, run, optimizer, x, y)
    run.step(optimizer)


def by_closure(model, run, optimizer, x, y, loader):
    run.backward(loss_of(model, x, y))
    run.step(torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (mean_and_sum, "got a mean and a sum with its own count in one step"),
        (nested, "train_loader was iterated again within its own loop"),
        (two_styles, r"loss\.backward\(\) and run\.backward\(loss\) were both called"),
        (no_step, r"run\.backward\(loss\) was called in a step, but run\.step\(optimizer\) was not"),
        (twice, "run.step was called twice for one batch"),
        (by_closure, "LBFGS several times"),
    ],
)
def test_loops_that_would_train_wrongly_are_refused(mistake: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(refused(mistake), procs=2)


def test_a_group_that_is_added_later_is_summed_over_lanes_and_ranks() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
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


def test_an_optimizer_of_each_epoch_and_two_loops_over_epochs_are_restored() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        rows = []
        for phase in range(2):
            for epoch in run.epochs(3):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                for batch in train_loader:
                    step_of(model, run, optimizer, *batch)
                    stop_at(run, 4 * STEPS + 2)
                rows.append((phase, epoch))
                if (phase, epoch) == (0, 1):
                    break
        return rows

    whole, parts = resumed(train, num_epochs=6)
    assert whole.value == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert parts.weights_sha256 == whole.weights_sha256
    assert parts.history == whole.history


def test_a_look_at_the_first_batch_and_an_endless_iterator_do_no_harm() -> None:
    def endless(loader):
        while True:
            yield from loader

    def train(model, train_loader, val_loader, device, num_epochs, run):
        shape = next(iter(train_loader))[0].shape
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = endless(train_loader)
        for _ in run.epochs(num_epochs):
            for _ in range(len(train_loader)):
                step_of(model, run, optimizer, *next(batches))
                stop_at(run, STEPS + 2)
        return tuple(shape)

    def plainly(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    whole = start(train, procs=2)
    assert whole.value == (4, 1, 6, 6)
    assert whole.weights_sha256 == start(plainly).weights_sha256
    assert not warnings_in(whole.run_dir)


@pytest.mark.parametrize("make", [lambda: print, threading.Lock], ids=["a function", "what cannot be copied"])
def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step(make: Callable[[], Any]) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.state["thing"] = make()
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    with pytest.raises(ConfigError, match=r"run\.state cannot be kept in a checkpoint"):
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
        for _ in run.epochs(num_epochs):
            for batch in train_loader:
                step_of(model, run, optimizer, *batch)

    assert len({start(train, procs, model_fn=Twice).weights_sha256 for procs in (1, 2, 4)}) == 1
