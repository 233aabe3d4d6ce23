"""Evaluating and predicting with a trained model: every sample once, in the order of the data set, equal numbers."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Trainer
from paceline.errors import ConfigError
from support.datasets import MapDataset


def make_dataset(df: pd.DataFrame) -> TensorDataset:
    return TensorDataset(torch.tensor(df.x.to_numpy(), dtype=torch.float32)[:, None], torch.tensor(df.y.to_numpy()))


def table(size: int) -> pd.DataFrame:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).numpy()
    return pd.DataFrame({"x": x, "y": (x > 0.3).astype("int64")})


def train(**options: Any) -> Any:
    return Trainer(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), make_dataset, table(100),
        loss_fn=nn.functional.cross_entropy, batch_size=8, num_epochs=2, lanes=4, threads=1,
        **{"val_df": table(61), **options},
    ).start()  # fmt: skip


def test_predictions_have_the_order_of_the_data_set_at_any_number_of_ranks() -> None:
    result = train(procs=2, metrics=["accuracy"])
    new = table(61)
    model = result.load_model().eval()
    with torch.no_grad():
        expected = model(make_dataset(new).tensors[0])
    predicted = [result.predict(df=new, procs=procs) for procs in (1, 4)]
    assert predicted[0].shape == (61, 2)
    assert torch.equal(predicted[0], predicted[1])
    torch.testing.assert_close(predicted[0], expected)
    assert torch.equal(result.predict(procs=2), predicted[0])  # the validation data is the same table
    assert result.evaluate(procs=4) == result.evaluate(procs=1) == result.metrics


def test_torchmetrics_are_accepted_as_they_are_and_equal_to_the_digit() -> None:
    metrics = {
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=2),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=2, average="macro"),
        "confidence": lambda output, target: output.softmax(-1).amax(-1).mean(),
    }
    results = [train(procs=procs, metrics=metrics) for procs in (1, 2, 4)]
    assert results[0].history == results[1].history == results[2].history
    validation = make_dataset(table(61))
    with torch.no_grad():
        output = results[0].load_model().eval()(validation.tensors[0])
    for name in ("auroc", "f1"):
        alone = metrics[name]
        alone.reset()
        alone.update(output, validation.tensors[1])
        assert results[0].metrics[name] == pytest.approx(alone.compute().item(), abs=1e-6)


def test_torchmetrics_do_not_talk_to_ranks_that_have_nothing_to_evaluate() -> None:
    metrics = {"f1": torchmetrics.F1Score(task="multiclass", num_classes=2, average="macro")}
    result = train(procs=4, metrics=metrics, val_df=table(5))
    assert result.evaluate() == result.metrics


def test_evaluating_does_not_disturb_training(tmp_path: Path) -> None:
    quiet = Trainer(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), make_dataset, table(100),
        loss_fn=nn.functional.cross_entropy, batch_size=8, num_epochs=2, val_fraction=0, lanes=4, threads=1, procs=2,
    ).start()  # fmt: skip
    assert quiet.weights_sha256 == train(procs=2).weights_sha256
    assert quiet.metrics == {}
    assert json.loads((quiet.run_dir / "result.json").read_text())["history"][-1].keys() == {
        "epoch",
        "step",
        "train_loss",
    }


def test_bf16_does_not_round_what_is_measured() -> None:
    result = train(procs=1, precision="bf16", metrics=["accuracy"])
    outputs, target = result.predict(procs=1), make_dataset(table(61)).tensors[1]
    assert outputs.dtype == torch.float32
    assert result.metrics["val_loss"] == pytest.approx(nn.functional.cross_entropy(outputs, target).item(), abs=1e-6)


def test_threads_are_those_of_the_run_at_any_number_of_ranks() -> None:
    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.get_num_threads()

    result = Trainer(
        Threads, lambda df: TensorDataset(torch.ones(len(df), 1), torch.ones(len(df), 1)), table(20),
        loss_fn=nn.functional.mse_loss, lanes=2, procs=1, val_fraction=0.5, batch_size=2,
    ).start()  # fmt: skip
    assert torch.equal(result.predict(procs=1), result.predict(procs=2))


def test_data_to_predict_may_be_a_file_and_missing_data_is_an_error(tmp_path: Path) -> None:
    table(61).to_csv(tmp_path / "new.csv", index=False)
    result = train(procs=1)
    assert result.predict(df=str(tmp_path / "new.csv")).shape == (61, 2)
    with pytest.raises(ConfigError, match="does not exist"):
        result.predict(df="missing.csv")
    own = Trainer(
        lambda: nn.Linear(1, 2), make_dataset, table(20), train_fn=lambda *arguments: None, procs=1, val_fraction=0
    ).start()
    assert own.predict(df=table(5)).shape == (5, 2)
    with pytest.raises(ConfigError, match=r"evaluate needs evaluate_fn.*--config config\.yaml"):
        own.evaluate(df=table(5))
    with pytest.raises(ConfigError, match="the run has no validation data"):
        own.predict()
    with pytest.raises(ConfigError, match="df=<DataFrame> has no column y, which the run was trained with; add it"):
        own.predict(df=table(5)[["x"]])
    with pytest.raises(ConfigError, match=r"the samples contain text, .*; df has text in x"):  # all columns are there
        own.predict(df=table(5).assign(x="far"))


def test_one_ctrl_c_ends_an_evaluation_which_has_nothing_to_save() -> None:
    launcher = os.getpid()

    def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if Path("stop").exists():
            os.kill(launcher, signal.SIGINT)
            time.sleep(60)
        return torch.zeros(1), torch.zeros(1)

    result = Trainer(
        lambda: nn.Linear(1, 1), lambda: MapDataset(4, sample), loss_fn=nn.functional.mse_loss, procs=1,
        val_fraction=0.5,
    ).start()  # fmt: skip
    Path("stop").touch()
    with pytest.raises(KeyboardInterrupt):
        result.evaluate()
