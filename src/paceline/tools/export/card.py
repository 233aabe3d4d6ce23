"""The model card, README.md: the model, its metrics, and the code that loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import paceline
from paceline.config import Config
from paceline.config.functions import name_of
from paceline.run.layout import RunFolder
from paceline.run.result_file import read_result

RECIPES = Path(paceline.__file__).parent / "recipes"

if TYPE_CHECKING:
    from paceline.results.load import TrainedRun


def text(run: TrainedRun, weights_sha256: str, usage: str, notes: Sequence[str]) -> str:
    """The text of the card; `usage` is Python code that loads the model, `notes` are sentences about it."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _figures(run, weights_sha256).items())
    listed = "\n".join(f"- {note}" for note in notes)
    return f"""# {run.config.name}

Trained with Paceline; `config.yaml` is the config of the run.

| | |
|---|---|
{rows}

{listed}

```python
{usage}
```
"""


def loading_weights(config: Config, *, is_tied: bool) -> str:
    """Python code that loads weights.safetensors into a model of `model_fn`.

    `is_tied` if tensors have several names, of which the file contains one.
    """
    module, _, name = name_of(config.function("model_fn")).partition(":")
    if config.folder is not None and config.folder.is_relative_to(RECIPES):
        module = ".".join(("paceline.recipes", *config.folder.relative_to(RECIPES).parts, module))
    arguments = ", ".join(f"{key}={value!r}" for key, value in config.model_args.items())
    function = "load_model" if is_tied else "load_file"
    weights = '"weights.safetensors"'
    return "\n".join(
        (
            f"from {module} import {name.partition('.')[0]}; from safetensors.torch import {function}",
            f"model = {name}({arguments}).eval()",
            f"load_model(model, {weights})" if is_tied else f"model.load_state_dict(load_file({weights}))",
        )
    )


def _figures(run: TrainedRun, weights_sha256: str) -> dict[str, Any]:
    config, folder = run.config, RunFolder(run.run_dir)
    facts = read_result(folder.result)
    history = {row["step"]: number for number, row in enumerate(facts.history, start=1)} if facts is not None else {}
    versions = facts.versions if facts is not None else {}
    numbers = sum(parameter.numel() for parameter in run.model.parameters())
    figures = {
        "model": f"`{name_of(config.function('model_fn'))}`, {numbers:,} parameters",
        "data": f"`{name_of(config.function('dataset_fn'))}`" if config.dataset_fn is not None else None,
        "weights": run.origin,
        "epochs": facts.epoch if facts is not None and run.step == facts.step else history.get(run.step),
        **{name: f"{value:.6g}" for name, value in run.metrics.items()},
        "weights SHA-256": f"`{weights_sha256}`",
        "trained with": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "exported with": f"paceline {paceline.__version__}, torch {torch.__version__}",
    }
    return {name: value for name, value in figures.items() if value not in (None, "")}
