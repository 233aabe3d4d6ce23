"""The mistakes of a first hour: each is answered by one sentence with the place in the user's code and the fix.

Those that need no rank to be found are in `tests/unit/config/test_first_hour.py`.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from paceline import Trainer
from paceline.errors import ConfigError, RankFailed

HERE = re.escape(__file__)
PLACE = rf"\({HERE}:\d+\)"
X, Y = torch.randn(24, 4), torch.arange(24) % 3
# The text of torch 2.13.
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.06 GiB is "
    "free. Process 4711 has 3.25 GiB memory in use. Including non-PyTorch memory, this process has 19.37 GiB memory in "
    "use. Of the allocated memory 18.67 GiB is allocated by PyTorch, and 385.33 MiB is reserved by PyTorch but "
    "unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


class Net(nn.Module):
    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(inputs, 4), nn.Linear(4, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.first(x))


class Table(Dataset[Any]):
    """Samples of a table, with the columns that a test names."""

    def __init__(self, df: pd.DataFrame, inputs: str, target: str) -> None:
        self.df, self.inputs, self.target = df, inputs, target

    def __len__(self) -> int:
        return len(self.df)

    def __getitem__(self, index: int) -> Any:
        row = self.df.iloc[index]
        return torch.tensor([float(row[self.inputs])] * 4), row[self.target]


def table(inputs: str, target: str) -> dict[str, Any]:
    df = pd.DataFrame({"age": [1.0] * 24, "city": ["Rome"] * 24, "y": [0] * 24})
    return {"df": df, "dataset_fn": Table, "dataset_args": {"inputs": inputs, "target": target}}


def tensors(x: torch.Tensor = X, y: torch.Tensor = Y) -> TensorDataset:
    return TensorDataset(x, y)


def without_return(**options: Any) -> None:
    Net()


def item(output: torch.Tensor, target: torch.Tensor) -> float:
    return functional.cross_entropy(output, target).item()


def nothing(output: torch.Tensor, target: torch.Tensor) -> None:
    functional.cross_entropy(output, target)


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target).detach()


def without_memory(*batch: Any) -> Any:
    raise torch.OutOfMemoryError(NO_MEMORY)


def train_plain(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None:
    for x, y in train_loader:
        functional.cross_entropy(model(x), y).backward()


def step(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def own(loss_fn: Any = functional.cross_entropy) -> dict[str, Any]:
    """The keys of a loop of the user's that has this loss."""

    def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        for _ in run.epochs(num_epochs):
            for x, y in train_loader:
                run.backward(loss_fn(model(x), y))
                run.step(optimizer)

    return {"train_fn": train, "loss_fn": None}


PLAIN = {"train_fn": train_plain, "loss_fn": None}
LAYER = r"layer 'first' \(Linear\) gets"
UNFIT_LAYER = LAYER + r" an input of shape \(\d, 4\), but takes 5 features; give it in_features=4, .*"
FLOAT64 = LAYER + r" float64, but its weights are float32; convert the samples .* x\.float\(\).*"
FROM_1 = r"a target is class 3, but .* 3 classes, numbered from 0 to 2; subtract 1 from the targets .* 4 outputs"
TOO_FEW = (
    r"a target is class [12], but .* \(\d, 1\) has 1 class; give the last layer \d outputs, or use binary_cross_.*"
)
IN_TARGETS = r"the targets are text \('Rome'\), .*\.cat\.codes for categories, .*; df has text in city"
IN_SAMPLES = r"the samples contain text \('Rome'\), .*\.cat\.codes for categories, .*; df has text in city"
NO_GRADIENT = " returned a float, which has no gradient; return the tensor itself, without item"

# The mistakes of the managed loop, tried on one rank and on two.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "model_fn returns None": ({"model_fn": without_return}, f"model_fn {PLACE} returned None; it must return a torch"),
    "float64": ({"dataset_fn": lambda: tensors(X.double())}, f"{FLOAT64} {PLACE}"),
    "loss as a number": ({"loss_fn": item}, f"loss_fn {PLACE}{NO_GRADIENT}"),
    "loss is None": ({"loss_fn": nothing}, f"loss_fn {PLACE} returned None; return a mean over the batch"),
    "too few classes": ({"model_args": {"outputs": 1}}, f"{TOO_FEW} {PLACE}"),
    "labels from 1": ({"dataset_fn": lambda: tensors(y=Y + 1)}, f"{FROM_1} {PLACE}"),
    "input shape": ({"model_args": {"inputs": 5}}, f"{UNFIT_LAYER} {PLACE}"),
    "integers for huber_loss": (
        {"model_fn": lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "loss_fn": "huber_loss"},
        rf"the loss compares outputs and targets of different types .*: y\.float\(\) {PLACE}",
    ),
    "text in the samples": (table("city", "y"), f"{IN_SAMPLES} {PLACE}"),
    "text in the targets": (table("age", "city"), f"{IN_TARGETS} {PLACE}"),
}
# Further mistakes, and the same ones without validation and in loops of the user, tried on two ranks.
FURTHER: dict[str, tuple[dict[str, Any], str]] = {
    "float64, own loop": ({"dataset_fn": lambda: tensors(X.double()), **own()}, f"{FLOAT64} {PLACE}"),
    "float64, plain loop": ({"dataset_fn": lambda: tensors(X.double()), **PLAIN}, f"{FLOAT64} {PLACE}"),
    "loss as a number, no validation": ({"loss_fn": item, "val_fraction": 0}, f"loss_fn {PLACE}{NO_GRADIENT}"),
    "loss as a number, own loop": (own(item), rf"run\.backward\(loss\) got a float; pass a tensor .* {PLACE}"),
    "loss is None, no validation": ({"loss_fn": nothing, "val_fraction": 0}, f"loss_fn {PLACE} returned None; return"),
    "loss is None, own loop": (own(nothing), rf"run\.backward\(loss\) got None; pass a tensor .* {PLACE}"),
    "loss without gradient": ({"loss_fn": detached}, f"loss_fn {PLACE} returned a loss without a gradient; compute"),
    "too few classes, step_fn": (
        {"model_args": {"outputs": 1}, "loss_fn": None, "step_fn": step, "val_fraction": 0}, f"{TOO_FEW} {PLACE}"
    ),
    "labels from 1, own loop": ({"dataset_fn": lambda: tensors(y=Y + 1), **own()}, rf"{FROM_1} {PLACE}"),
    "input shape, plain loop": ({"model_args": {"inputs": 5}, **PLAIN}, f"{UNFIT_LAYER} {PLACE}"),
    "one output each": (
        {"model_args": {"outputs": 1}, "loss_fn": "mse_loss"},
        rf"mse_loss gets an output of shape \(\d, 1\) and targets of shape \(\d,\); return model\(x\)\..* {PLACE}",
    ),
    "an unknown column": (table("agee", "y"), rf"the table has no column agee; did you mean age\? {PLACE}"),
    "no samples": (
        {"dataset_fn": lambda: [None] * 24, "workers": 1},
        f"the data set returned None for a sample; return the sample, such as \\(x, y\\) {PLACE}",
    ),
    "nothing but inputs": ({"dataset_fn": lambda: X}, rf"a batch is a Tensor; each sample of the data set .* {PLACE}"),
    "text in the targets, own loop": ({**table("age", "city"), **own()}, f"{IN_TARGETS} {PLACE}"),
}  # fmt: skip


def start(tmp_path: Path, procs: int, **options: Any) -> Any:
    usual = {
        "model_fn": Net, "dataset_fn": tensors, "loss_fn": "cross_entropy", "batch_size": 4, "threads": 1,
        "device": "cpu", "run_dir": tmp_path / "run", "procs": procs, "val_fraction": 0.2,
        "log": {"tensorboard": False},
    }  # fmt: skip
    return Trainer(**{**usual, **options}).start()


@pytest.mark.parametrize(("case", "procs"), [*product(CASES, [1, 2]), *product(FURTHER, [2])])
def test_a_mistake_is_one_sentence_with_its_place_and_the_fix(case: str, procs: int, tmp_path: Path) -> None:
    options, sentence = {**CASES, **FURTHER}[case]
    with pytest.raises(ConfigError, match=f"^{sentence}") as caught:
        start(tmp_path, procs, **options)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("procs", [1, 2])
def test_a_lack_of_memory_names_what_to_lower(procs: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        start(tmp_path, procs, loss_fn=without_memory, lanes=2)
    assert (
        "OutOfMemoryError: GPU 0 has no memory for 2.00 GiB more (1.06 GiB of 23.69 GiB are free, 19.37 GiB are used "
        "by this process, 3.25 GiB by others); set batch_size=2, lanes=4 instead of 4 and 2, which keeps steps of 8 "
        "samples\n"
    ) in str(caught.value)
    assert re.search(rf"\n  at {HERE}:\d+\n", str(caught.value))


def test_integer_targets_of_a_regression_are_numbers(tmp_path: Path) -> None:
    def train(number: int, targets: torch.Tensor) -> str:
        data = lambda: tensors(y=targets)  # noqa: E731
        flat = lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))  # noqa: E731
        result = start(tmp_path / str(number), 1, dataset_fn=data, model_fn=flat, loss_fn="mse_loss")
        return result.weights_sha256

    assert train(1, Y) == train(2, Y.float())


def test_more_processes_than_cores_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.launch.local.usable_cores", lambda: 1)
    start(tmp_path, 2, lanes=2)
    printed = "2 processes share 1 core: they are not faster than procs=1, and each needs memory for its own copy"
    assert printed in capsys.readouterr().err
