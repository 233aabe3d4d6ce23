"""Recipes as they are run: one hash on 1 and 2 processes, and what can be done with the run then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.cli.arguments import find_config
from paceline.config import build, read_yaml


def train(recipe: str, procs: int, **keys: Any) -> paceline.Result:
    path = find_config(recipe)
    config = build({**read_yaml(path), "procs": procs, "threads": 1, **keys}, folder=path.parent)
    return paceline.Trainer.from_config(config, path.parent).start()


def test_lm_learns_identically_on_1_and_2_processes_and_writes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    keys = {
        "model_args": {"width": 16, "depth": 1, "heads": 2, "context": 16},
        "dataset_args": {"path": str(tmp_path / "text.txt"), "context": 16},
        "optimizer": {"name": "adamw", "lr": 0.02}, "schedule": {"name": "constant"}, "max_steps": 40, "batch_size": 4,
    }  # fmt: skip
    one, two = (train("lm", procs, **keys) for procs in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert one.metrics == two.metrics
    assert two.metrics["val_loss"] < 1.5  # 5.5 for a model that knows nothing
    text = paceline.load(two.run_dir).model.generate("to be ", length=20)
    assert len(text) == 26


def test_text_trains_identically_on_1_and_2_processes_and_loads_from_pretrained(
    tiny_encoder: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sentences = [f"{'very ' * (n % 7)}{'good' if n % 2 else 'bad'} film\t{n % 2}\n" for n in range(40)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(sentences))
    keys = {
        "model_args": {"model": tiny_encoder}, "dataset_args": {"model": tiny_encoder, "root": str(tmp_path)},
        "batch_size": 4, "num_epochs": 2,
    }  # fmt: skip
    one, two = (train("text", procs, **keys) for procs in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert one.metrics == two.metrics
    run = paceline.load(two.run_dir)
    folder = run.export("hf", tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "negative", 1: "positive"}
    inputs = tokenizer(["very good film", "bad"], padding=True, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[2, 7, 4, 6, 3], [2, 5, 3, 0, 0]]
    with torch.no_grad():
        expected = run.model(inputs["input_ids"], inputs["attention_mask"])
        assert torch.equal(model(inputs["input_ids"], inputs["attention_mask"]).logits, expected)
