"""The user's own loop with `run`, on real ranks: saved, stopped, killed and resumed to the same bits."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import own_loop_cases as own
import pytest
import torch
from exactness_cases import Images, frozen_net
from faults import Disturbed, count, events, outcome, saved_steps, send_self, start, stop_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional

import paceline
from paceline import Run, Trainer, indices_at
from paceline.checkpoint.store import Store
from paceline.data.seeding import seed_generators
from paceline.errors import ConfigError, RankFailed
from support.runs import events_of, warnings_in

KILL, TERM = send_self(signal.SIGKILL), send_self(signal.SIGTERM)
MANAGED_ONLY = dict.fromkeys(("loss_fn", "metrics", "optimizer", "schedule"))


def options(train_fn: Callable[..., Any] = own.train_with_everything, **changes: Any) -> dict[str, Any]:
    return {**MANAGED_ONLY, "train_fn": train_fn, "precision": "auto", **changes}


def disturbed(visit: int, act: Callable[[], None]) -> Callable[[], Images]:
    log = Path("fetched").resolve()
    return lambda: Disturbed(log, [visit], act)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(start(**options(run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run"))))


class ReportsItsEnd(Images):
    """A worker that ends as it is asked to writes a line."""

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "report"):
            self.report = Finalize(None, count, args=(Path("ended").resolve(),), exitpriority=1)
        return super().__getitem__(index)


def test_workers_end_with_the_loop_instead_of_delaying_its_end() -> None:
    start(**options(own.train_simply, dataset_fn=ReportsItsEnd, workers=2, procs=1))
    assert Path("ended").stat().st_size == 2


@pytest.mark.parametrize(("procs", "later"), [(2, 4), (4, 1)])
def test_a_stopped_loop_resumes_between_batches_on_other_ranks(undisturbed: dict, procs: int, later: int) -> None:
    stopped_at = stop_step(**options(dataset_fn=disturbed(2, TERM), procs=procs))
    assert saved_steps()[-1] == stopped_at
    assert stopped_at % 7  # within an epoch
    assert outcome(start(**options(resume="auto", procs=later))) == undisturbed


def test_a_killed_rank_costs_nothing_but_time(undisturbed: dict) -> None:
    saved_at_once = {"every_steps": 2, "async": False}
    result = start(**options(dataset_fn=disturbed(3, KILL), procs=2, checkpoint=saved_at_once))
    assert outcome(result) == undisturbed
    assert "SIGKILL; restarting from step" in events("restarted")[0]["text"]


def test_a_time_limit_stops_the_loop_and_loses_nothing(undisturbed: dict) -> None:
    stopped_at = stop_step(**options(dataset_fn=disturbed(2, lambda: None), time_limit=0.001, procs=1))
    assert stopped_at == 1
    assert events("run_stopped")[-1]["reason"] == "the time limit"
    assert outcome(start(**options(resume="auto", procs=2))) == undisturbed


def test_a_stop_that_the_users_code_catches_still_stops_the_run() -> None:
    def stubborn(model, train_loader, val_loader, device, num_epochs, run):
        for _ in range(3):
            try:
                own.train_simply(model, train_loader, val_loader, device, num_epochs, run)
            except BaseException:  # noqa: BLE001
                continue

    assert stop_step(**options(stubborn, dataset_fn=disturbed(2, TERM), procs=2, ema=None))


def test_a_second_model_and_numbers_of_the_users_own_are_saved_and_restored() -> None:
    whole = outcome(start(**options(own.train_two_networks, run_dir="whole")))
    stop_step(**options(own.train_two_networks, dataset_fn=disturbed(2, TERM), procs=2))
    assert outcome(start(**options(own.train_two_networks, resume="auto"))) == whole


def test_an_own_loop_gives_the_weights_of_the_managed_loop() -> None:
    shared = {"precision": "fp32", "ema": None, "schedule": None}
    managed = start(
        run_dir="managed",
        optimizer=None,
        optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9),
        **shared,
    )
    mine = start(**options(own.train_simply, run_dir="own", procs=2, **shared))
    assert mine.weights_sha256 == managed.weights_sha256
    assert mine.optimizer_sha256 == managed.optimizer_sha256
    ours, theirs = (
        [row[key] for row in each.history for key in ("train_loss", "accuracy")] for each in (mine, managed)
    )
    assert ours == theirs


def test_what_is_logged_reaches_events_tensorboard_and_the_result() -> None:
    result = start(**options(procs=2))
    first = events("step")[0]
    assert first["values"]["doubled"] == pytest.approx(2 * first["loss"], rel=1e-5)
    assert [row["updates"] for row in result.history] == [7, 14, 21]
    assert result.metrics == {name: result.history[-1][name] for name in ("accuracy", "updates")}
    assert any(Path("run").rglob("events.out.tfevents*"))
    assert 14 in saved_steps()  # run.save() after the second epoch


def test_tensorboard_shows_tensors_as_histograms() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        own.train_simply(model, train_loader, val_loader, device, num_epochs, run)
        run.log(weights=model[0].weight.flatten(), bad=torch.tensor([1.0, torch.nan, 3.0]))

    start(**options(train, procs=2, ema=None))
    board = EventAccumulator("run/tensorboard").Reload()
    [weights], [bad] = board.Histograms("weights"), board.Histograms("bad")
    assert (weights.step, weights.histogram_value.num) == (21, 72)
    assert (bad.histogram_value.num, bad.histogram_value.sum) == (2, 4)


def test_sums_means_and_rows_of_all_ranks() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        rows = torch.full((1 + run.rank, 2), float(run.rank))
        return {
            "sum": run.sum(run.rank + 1), "floats": run.sum(0.5),
            "tensor": run.sum(torch.tensor([1.0, run.rank])).tolist(),
            "mean": run.mean(float(run.rank), weight=run.rank), "gather": run.gather(rows)[:, 0].tolist(),
            "current": paceline.current_run() is run, "main": run.is_main, "size": run.world_size,
        }  # fmt: skip

    value = Trainer(model_fn=lambda: nn.Linear(1, 1), dataset_fn=Images, train_fn=train, procs=3).start().value
    assert value == {
        "sum": 6, "floats": 1.5, "tensor": [3.0, 3.0], "mean": (1 + 4) / 3, "gather": [0, 1, 1, 2, 2, 2],
        "current": True, "main": True, "size": 3,
    }  # fmt: skip


def train_contrastive(model, train_loader, val_loader, device, num_epochs, run):
    """Each sample against the samples of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, _ in train_loader:
            features = functional.normalize(model(x.flatten(1)), dim=1)
            everything = run.gather(features, with_grad=True)
            first = run.sum(len(features)) // run.world_size * run.rank
            loss = functional.cross_entropy(features @ everything.T * 5, torch.arange(first, first + len(features)))
            run.backward(loss)
            run.step(optimizer)


def test_sums_of_different_types_and_of_ranks_without_samples() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        is_first = run.is_main
        return [
            run.sum(torch.tensor(2.5, dtype=torch.float64) if is_first else torch.tensor(7)).item(),
            run.sum(torch.tensor([3, 4]) if is_first else 0).tolist(),
            run.sum(torch.tensor(1 + 2j)).item(),
            run.sum(torch.tensor(True)).item(),
            run.mean(torch.tensor(4.0) if is_first else torch.tensor(float("nan")), weight=2 if is_first else 0).item(),
            math.isnan(run.mean(1.0, weight=0)),
        ]

    value = Trainer(model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=train, procs=2).start().value
    assert value == [9.5, [3, 4], 2 + 4j, 2, 4.0, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.sum([1, 2]), "run.sum got a list; pass a number or a tensor"),
        (lambda run: run.gather([1, 2]), "run.gather got a list; pass a tensor"),
        (lambda run: run.gather(torch.zeros(3, 1 + run.rank)), "rows of the ranks differ"),
        (
            lambda run: run.gather(torch.zeros(3, dtype=[torch.int32, torch.float32][run.rank])),
            "rows of the ranks diff",
        ),
    ],
)
def test_what_the_ranks_cannot_combine_is_one_sentence(call: Callable[..., Any], message: str) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        call(run)

    with pytest.raises(ConfigError, match=message):
        Trainer(model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=train, procs=2).start()


def test_gradients_return_to_the_rank_of_each_gathered_row() -> None:
    """Two ranks with half of the batch each are as one rank with the whole batch, to rounding."""
    shared = {
        "model_fn": lambda: nn.Linear(36, 8),
        "dataset_fn": Images,
        "train_fn": train_contrastive,
        "num_epochs": 2,
    }
    alone = Trainer(**shared, batch_size=20, procs=1, val_fraction=0, seed=3).start().load_model()
    both = Trainer(**shared, batch_size=10, procs=2, val_fraction=0, seed=3).start().load_model()
    torch.testing.assert_close(both.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)


def test_plain_calls_average_gradients_as_ddp_does() -> None:
    def step(model, x, y, optimizer):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def with_run(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                step(model, x.flatten(1), y, optimizer)

    def in_ddp(model, train_loader, val_loader, device, num_epochs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(num_epochs):
            for x, y in train_loader:
                step(model, x.flatten(1), y, optimizer)

    shared = {
        "model_fn": lambda: nn.Linear(36, 2),
        "dataset_fn": Images,
        "batch_size": 8,
        "val_fraction": 0,
        "procs": 2,
    }
    mine, theirs = (Trainer(**shared, train_fn=each, num_epochs=2).start() for each in (with_run, in_ddp))
    # The batches of both loaders have the same samples: those of 80 are 5 whole steps of 16.
    weights = [dict(each.load_model().state_dict()) for each in (mine, theirs)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    assert {event["lr"] for event in events_of(mine.run_dir, "step")} == {0.1}


def test_two_optimizers_in_one_batch_compute_what_a_plain_loop_computes() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(36, 4), nn.Linear(4, 2)

    def optimizers(model):
        return torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.SGD(model.second.parameters(), 0.2, 0.9)

    def train(model, train_loader, val_loader, device, num_epochs, run):
        first, second = optimizers(model)
        run.track(first=first, second=second)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                features = model.first(x.flatten(1))
                run.backward(functional.cross_entropy(model.second(features.detach()), y))
                run.step(second)
                run.backward(functional.cross_entropy(model.second(features), y))
                run.step(first)
                second.zero_grad()

    shared = {
        "model_fn": Pair, "dataset_fn": Images, "val_fraction": 0, "train_fn": train, "batch_size": 8, "num_epochs": 2,
        "threads": 1, "device": "cpu", "procs": 2,
    }  # fmt: skip
    trained = Trainer(**shared).start().load_model()
    with pytest.raises(ConfigError, match="lanes=4 on 2 ranks, but two optimizers step in one batch"):
        Trainer(**shared, lanes=4).start()

    # The same updates without Paceline's loop and loaders, each over the 16 samples of both ranks at once.
    seed_generators(0, "model")
    model, data = Pair(), Images()
    first, second = optimizers(model)
    for epoch in range(2):
        order = torch.from_numpy(indices_at(seed=0, epoch=epoch, size=len(data), positions=range(len(data))))
        for chosen in order.split(16):
            x, y = data.images[chosen].flatten(1), data.labels[chosen]
            second.zero_grad()
            functional.cross_entropy(model.second(model.first(x).detach()), y).backward()
            second.step()
            first.zero_grad()
            functional.cross_entropy(model.second(model.first(x)), y).backward()
            first.step()
    torch.testing.assert_close(dict(trained.state_dict()), dict(model.state_dict()))


def test_a_rank_may_look_at_a_batch_by_itself_and_the_loader_may_be_left_early() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        if run.is_main:
            next(iter(train_loader))
            next(iter(val_loader))
        seen = []
        for epoch in run.epochs(num_epochs):
            for number, (x, y) in enumerate(train_loader):
                run.backward(functional.cross_entropy(model(x.flatten(1)), y))
                run.step(optimizer)
                seen.append(x[0, 0, 0, 0].item())
                if number == 1:
                    break
            if epoch == 1:
                break
        return seen, run.step_number, len(run.history)

    shared = {"model_fn": lambda: nn.Linear(36, 2), "dataset_fn": Images, "train_fn": train, "batch_size": 8}
    result = Trainer(**shared, num_epochs=5, procs=2).start()
    seen, _, _ = result.value
    assert len(set(seen)) == 4  # two batches of each of two epochs
    assert [row["epoch"] for row in result.history] == [1, 2]


def broken(mistake: Callable[..., Any]) -> Callable[..., Any]:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                mistake(run, optimizer, functional.cross_entropy(model(x.flatten(1)), y))
            mistake(run, optimizer, None)

    return train


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda run, optimizer, loss: run.step(optimizer),
            r"run\.step\(optimizer\) needs run\.backward\(loss\) in the same",
        ),
        (
            lambda run, optimizer, loss: run.backward(loss) if loss is None else None,
            r"run\.backward\(loss\) was called outside",
        ),
        (
            lambda run, optimizer, loss: run.track(factor=3),
            r"run\.track\(factor=…\) got a int, which has no state_dict",
        ),
        (lambda run, optimizer, loss: run.log(epoch=1), r"run\.log\(epoch=…\) has a name that is reserved"),
        (
            lambda run, optimizer, loss: run.log(image=torch.zeros(2, 2, 9)),
            r"run\.log\(image=…\) has the shape \(2, 2, 9\)",
        ),
        (lambda run, optimizer, loss: run.ema_weights(), "needs averaged weights; set ema"),
        (
            lambda run, optimizer, loss: (run.backward(loss), run.step(optimizer)) if run.rank == 0 else 1 / 0,
            "ZeroDivisionError",
        ),
    ],
    ids=["no backward", "outside", "no state", "reserved", "not a number", "no average", "one rank raises"],
)
def test_a_mistake_in_the_loop_is_one_sentence(mistake: Callable[..., Any], message: str) -> None:
    with pytest.raises((ConfigError, RankFailed), match=message):
        Trainer(
            model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=broken(mistake), procs=2, max_restarts=0
        ).start()


def test_a_loop_that_steps_by_itself_after_run_backward_is_refused() -> None:
    def forgetful(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x.flatten(1)), y))
            optimizer.step()

    with pytest.raises(
        ConfigError, match=r"run\.backward\(loss\) was called in a batch, but run\.step\(optimizer\) was not"
    ):
        Trainer(
            model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=forgetful, procs=2, max_restarts=0
        ).start()


def test_a_scheduler_that_is_not_tracked_is_reported() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                run.backward(functional.cross_entropy(model(x.flatten(1)), y))
                if run.step(optimizer):
                    scheduler.step()

    result = Trainer(model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=train, procs=1).start()
    assert any("a scheduler of the optimizer is not tracked" in text for text in warnings_in(result.run_dir))


def test_a_loop_without_run_epochs_keeps_no_checkpoints_and_says_so() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in range(num_epochs):
            for x, y in train_loader:
                run.backward(functional.cross_entropy(model(x.flatten(1)), y))
                run.step(optimizer)

    result = Trainer(
        model_fn=lambda: nn.Linear(36, 2), dataset_fn=Images, train_fn=train, num_epochs=2, procs=2,
        checkpoint={"every_steps": 1}, batch_size=8,
    ).start()  # fmt: skip
    assert not (result.run_dir / "checkpoints").exists() or not list((result.run_dir / "checkpoints").glob("step-*"))
    assert any("no checkpoints are kept" in text for text in warnings_in(result.run_dir))


def test_callbacks_early_stopping_and_the_best_checkpoint_work_in_own_loops() -> None:
    class Steps(paceline.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step(self, run: Run, metrics: Any) -> None:
            self.losses.append(metrics["loss"])

        def on_stop(self, run: Run, reason: str | None) -> None:
            if run.is_main:
                Path("losses").write_text(str(len(self.losses)))

    result = start(**options(callbacks=[Steps()], checkpoint={"best": {"metric": "accuracy", "mode": "max"}}, procs=2))
    assert Path("losses").read_text() == str(result.step)
    best = max(result.history, key=lambda row: row["accuracy"])
    assert best["step"] in saved_steps()


def test_a_run_of_an_own_loop_can_be_evaluated_and_predicts() -> None:
    result = start(**options(loss_fn=functional.cross_entropy, metrics=["accuracy"], ema=None))
    assert result.evaluate()["accuracy"] == pytest.approx(result.history[-1]["accuracy"])
    assert result.predict().shape == (61, 2)


def sums_of_pools(size: int) -> Images:
    """A data set that is built by pools of processes, whose workers end at a SIGTERM."""
    for _ in range(8):
        with multiprocessing.get_context("fork").Pool(4) as pool:
            pool.map(abs, range(100))
    return Images(size)


def test_pools_of_the_users_code_end_in_both_loops() -> None:
    changes = {"dataset_fn": lambda: sums_of_pools(61), "procs": 2, "hang_timeout_s": 60, "max_steps": 2}
    start(**options(own.train_simply, **changes, run_dir="own"))
    start(**changes, run_dir="managed")


def test_a_checkpoint_at_the_end_of_an_epoch_does_not_delay_the_next_one() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        """Publishing waits until the next epoch has begun."""
        has_begun, publish, in_time = threading.Event(), Store.publish, []

        def publish_late(*arguments):
            in_time.append(has_begun.wait(20))
            return publish(*arguments)

        Store.publish = publish_late
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(optimizer=optimizer)
        for epoch in run.epochs(num_epochs):
            for x, y in train_loader:
                if epoch:
                    has_begun.set()
                run.backward(functional.cross_entropy(model(x), y))
                run.step(optimizer)
            run.log(accuracy=0.1 * epoch)
        return in_time

    best = {"best": {"metric": "accuracy", "mode": "max"}, "every_minutes": None}
    assert start(**options(train, checkpoint=best, num_epochs=2)).value[0]


def test_a_watched_metric_that_the_loop_does_not_log_is_reported_once() -> None:
    watched = {"early_stop": {"metric": "acc", "mode": "max", "patience": 1}}
    result = start(**options(own.train_with_everything, checkpoint={"best": {"metric": "val_loss"}}, **watched))
    assert result.epoch == 3
    reported = [text.partition(" is not among the values of an epoch (") for text in warnings_in(result.run_dir)]
    keys = ["checkpoint.best.metric='val_loss'", "early_stop.metric='acc'"]
    assert [key for key, _, rest in reported if rest.startswith("train_loss, ")] == keys


def test_a_frozen_part_costs_nothing_after_the_first_step_without_run_backward() -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        run.track(optimizer=optimizer)
        moving = []
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                moving.append(len(run.loop.step.replica.forward_state.moving))
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return moving

    frozen = start(**options(train, model_fn=frozen_net, num_epochs=1, lanes=2, procs=2, ema=None)).value
    assert frozen[0] > 0
    assert set(frozen[1:]) == {0}
