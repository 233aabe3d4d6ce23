"""Recipes on a GPU: their steps are recorded, with the bits of single kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paceline
from paceline.cli.arguments import find_config
from paceline.config import build, read_yaml
from support.runs import warnings_in


def train(recipe: str, **keys: Any) -> tuple[str, list[str]]:
    """The hash of the weights, and the warnings."""
    path = find_config(recipe)
    config = build({**read_yaml(path), "procs": 1, "device": "cuda", **keys}, folder=path.parent)
    result = paceline.Trainer.from_config(config, path.parent).start()
    assert result.weights_sha256 is not None
    return result.weights_sha256, warnings_in(result.run_dir)


def test_text_is_recorded_with_its_masks_and_dropout(tiny_encoder: str, tmp_path: Path) -> None:
    sentences = [f"{'very ' * (n % 20)}{'good' if n % 2 else 'bad'} film\t{n % 2}\n" for n in range(80)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(sentences))
    keys = {
        "model_args": {"model": tiny_encoder}, "dataset_args": {"model": tiny_encoder, "root": str(tmp_path)},
        "batch_size": 4, "num_epochs": 4, "ema": 0.9,
    }  # fmt: skip
    recorded, warning = train("text", **keys, step_mode="graph")
    assert warning == []
    assert (recorded, []) == train("text", **keys, step_mode="eager")
