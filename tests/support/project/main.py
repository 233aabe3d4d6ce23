"""A user's script with the public names that scripts need. Tests check it with pyright in strict mode, and run it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import paceline
from paceline import Callback, Result, Run, Sum, Trainer, current_run, every, load

Batch = tuple[Tensor, Tensor]


class Points(Dataset[Batch]):
    """Points in a plane, with the side of the diagonal on which they are."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.points = torch.tensor([table["x"].tolist(), table["y"].tolist()]).T
        self.sides = (self.points[:, 0] > self.points[:, 1]).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Batch:
        return self.points[index], self.sides[index]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)


class GoodEnough(Callback):
    """Ends the run when the accuracy is high."""

    def on_start(self, run: Run) -> None:
        run.print(f"{run.world_size} processes, {run.total_steps} steps")

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        accuracy = metrics["accuracy"]
        if accuracy is not None and accuracy > 0.999:
            run.finish("the accuracy is high enough")

    def on_checkpoint(self, run: Run, path: Path) -> None:
        print(f"step {run.step_number}: {path.name}")


def right(output: Tensor, target: Tensor) -> Sum:
    return Sum((output.argmax(dim=1) == target).sum(), len(target))


def weighted_loss(output: Tensor, target: Tensor) -> Sum:
    weights = 1.0 + target
    return Sum((cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


def first_step(model: Net, batch: Batch) -> dict[str, Tensor]:
    points, sides = batch
    loss = cross_entropy(model(points), sides)
    return {"loss": loss, "margin": model(points).std()}


def second_step(model: Net, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def optimizers(model: Net) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": torch.optim.Adam(model.layers[0].parameters(), lr=1e-3),
        "second": torch.optim.SGD(model.layers[2].parameters(), lr=1e-3),
    }


def evaluate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": cross_entropy(model(batch[0]), batch[1])}


def train(
    model: Net, train_loader: Iterable[Batch], val_loader: Iterable[Batch], device: torch.device, num_epochs: int,
    run: Run,
) -> float:  # fmt: skip
    """A loop of the user's own, which is saved and resumed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(optimizer=optimizer)
    accuracy = torch.zeros((), device=device)
    for epoch in run.epochs(num_epochs):
        model.train()
        for points, sides in train_loader:
            with run.autocast():
                loss = cross_entropy(model(points), sides)
            run.backward(loss)
            if run.step(optimizer, clip_norm=1.0):
                run.state["last"] = epoch
            run.log(loss=loss)
        accuracy = run.sum(count(model, val_loader)) / run.sum(sum(len(sides) for _, sides in val_loader))
        run.log(accuracy=accuracy)
    assert current_run() is run
    return float(accuracy)


@torch.no_grad()
def count(model: Net, loader: Iterable[Batch]) -> Tensor:
    model.eval()
    return torch.stack([(model(points).argmax(dim=1) == sides).sum() for points, sides in loader]).sum()


def sides_of(result: Result, table: pd.DataFrame) -> Tensor:
    print(result.evaluate(df=table)["accuracy"])
    return result.predict(table).argmax(dim=1)


def batch_of(samples: list[Batch]) -> Batch:
    points, sides = zip(*samples, strict=True)
    return torch.stack(points), torch.stack(sides)


def rates(step: int, total_steps: int) -> float:
    return 1 - step / total_steps


def exponential(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


table = pd.DataFrame({"x": [0.1, 0.9, 0.4, 0.7] * 8, "y": [0.5, 0.2, 0.3, 0.8] * 8})
managed: Result = Trainer(
    Net,
    Points,
    table,
    num_epochs=2,
    model_args={"width": 16},
    loss_fn=cross_entropy,
    metrics={"accuracy": right},
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
    schedule={"name": "cosine", "warmup_steps": 2},
    early_stop={"metric": "accuracy", "mode": "max", "patience": 3},
    evaluate={"every_steps": 4},
    callbacks=[GoodEnough(), paceline.LearningRateMonitor()],
    checkpoint={"every_steps": 4, "best": {"metric": "accuracy", "mode": "max"}, "async": False},
    log={"every_steps": 2, "tensorboard": False},
    time_limit="1h",
    run_dir=Path("managed"),
    procs=1,
).start()
print(managed.metrics["val_loss"], managed.history[-1]["epoch"], managed.seconds)

own = Trainer(Net, Points, table, train, 4, 2, run_dir="own", nan="stop", precision="fp32").start()
print(own.value, own.weights_sha256)

others = [
    Trainer(Net, Points, table, loss_fn=weighted_loss, schedule_fn=rates, sample_weights=[1.0] * len(table)),
    Trainer(Net, Points, table, loss_fn=nn.CrossEntropyLoss(), scheduler_fn=exponential, collate_fn=batch_of),
    Trainer(
        Net, Points, table, step_fn={"first": first_step, "second": every(2, second_step)}, optimizer_fn=optimizers,
        evaluate_fn=evaluate, log={"trackers": ["mlflow"]}, augment={"flip": "random"},
    ),
]  # fmt: skip
print([trainer.config.seed for trainer in others])

loaded = load("managed", checkpoint="best")
print(loaded.metrics["accuracy"], loaded.model(torch.zeros(1, 2)).shape)
try:
    Trainer(Net, Points, table, loss_fn="cross_entropi")
except paceline.errors.ConfigError as error:
    print(error.problems)
