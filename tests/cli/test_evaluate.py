"""`paceline evaluate` and `paceline predict` on a run that another process has trained."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import torch

import paceline


def test_a_recipe_is_evaluated_to_the_digit_and_predicts_in_order_in_fresh_processes(run, tmp_path: Path) -> None:
    trained = run(
        "paceline", "train", "digits", "num_epochs=2", "ema=0.9", "checkpoint.best.metric=val_loss", "--procs", "2",
        "--run-dir", "run",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    history = json.loads((tmp_path / "run" / "result.json").read_text())["history"]
    for row, options in ((1, ("--procs", "1")), (0, ("--procs", "2", "--checkpoint", str(history[0]["step"])))):
        ended = run("paceline", "evaluate", "run", "--json", *options)
        assert ended.returncode == 0, ended.stderr
        printed = json.loads(ended.stdout)
        assert printed["metrics"] == {name: history[row][name] for name in ("val_loss", "accuracy")}
        assert printed["step"] == history[row]["step"]
        assert "the average of the weights (ema)" in printed["weights"]
    files = sorted((tmp_path / "run" / "evaluate").glob("*/metrics.json"))
    assert [json.loads(path.read_text())["metrics"]["val_loss"] for path in files] == [
        history[1]["val_loss"],
        history[0]["val_loss"],
    ]

    ended = run("paceline", "predict", "run", "--out", "preds.csv", "--procs", "2", "--checkpoint", "last")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"preds.csv: 359 predictions, weights: step {history[1]['step']} (last)")
    table = pd.read_csv(tmp_path / "preds.csv")
    loaded = paceline.load("run", "last")
    images, labels = loaded.config.function("dataset_fn")()[table["index"].tolist()]
    with torch.no_grad():
        expected = loaded.model(images)
    scores = torch.tensor(table[[f"score_{number}" for number in range(10)]].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(scores, expected)
    assert table["prediction"].tolist() == scores.argmax(1).tolist()
    assert (table["prediction"].to_numpy() == labels.numpy()).mean() == history[1]["accuracy"]
