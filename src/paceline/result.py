"""What a run leaves behind: `result.json`, the weights, and the `Result` that `start()` returns."""

from __future__ import annotations

import json
import pickle
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import safetensors.torch
import torch

from paceline.digest import sha256_of, sha256_of_optimizer
from paceline.ema import Ema
from paceline.run_folder import RunFolder, write_json, write_private


@dataclass
class Result:
    """The outcome of a run."""

    run_dir: Path
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    weights_sha256: str
    ema_sha256: str | None
    optimizer_sha256: str | None
    step: int
    epoch: int
    world_size: int
    lanes: int
    seconds: float
    samples: int
    versions: dict[str, str]
    value: Any = None
    _make_model: Callable[[], torch.nn.Module] | None = field(default=None, repr=False, compare=False)

    def load_model(self) -> torch.nn.Module:
        """The trained model on the CPU, without any wrapper: the average of the weights if the run kept one."""
        assert self._make_model is not None
        folder, model = RunFolder(self.run_dir), self._make_model()
        safetensors.torch.load_model(model, folder.weights if self.ema_sha256 is None else folder.ema)
        return model


def write(
    folder: RunFolder,
    model: torch.nn.Module,
    ema: Ema | None,
    optimizer: torch.optim.Optimizer | None,
    value: Any,
    **facts: Any,
) -> None:
    """Leave the weights, what `train_fn` returned and `result.json`, in this order. Rank 0 only."""
    facts["weights_sha256"], facts["ema_sha256"] = _save_weights(model, folder.weights), None
    if ema is not None:
        with ema.applied():
            facts["ema_sha256"] = _save_weights(model, folder.ema)
    facts["optimizer_sha256"] = sha256_of_optimizer(optimizer) if optimizer is not None else None
    if value is not None:
        try:
            write_private(folder.value, cloudpickle.dumps(value))
        except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
            warnings.warn(f"what train_fn returned does not pickle, so result.value is None: {error}", stacklevel=2)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(folder.result, {**facts, "versions": versions})


@dataclass(frozen=True)
class Outcome:
    """A run's result as bytes, which any process can be sent: `result.json` and the pickled value of `train_fn`."""

    run_dir: Path
    facts: str
    value: bytes | None

    def to_result(self, make_model: Callable[[], torch.nn.Module]) -> Result:
        """The result for the caller of `start()`."""
        value = pickle.loads(self.value) if self.value is not None else None
        return Result(run_dir=self.run_dir, value=value, _make_model=make_model, **json.loads(self.facts))


def collect(folder: RunFolder) -> Outcome:
    """What rank 0 has left in the run folder."""
    value = folder.value.read_bytes() if folder.value.exists() else None
    return Outcome(folder.path, folder.result.read_text(encoding="utf-8"), value)


def _save_weights(model: torch.nn.Module, path: Path) -> str:
    partial = path.with_name(f".{path.name}")
    safetensors.torch.save_model(model, str(partial))
    partial.replace(path)
    return sha256_of(model.state_dict())
