"""What a run leaves behind: `result.json`, the weights, and the `Result` that `start()` returns."""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import safetensors.torch
import torch

from paceline.run_folder import RunFolder, write_json, write_private


@dataclass
class Result:
    """The outcome of a run."""

    run_dir: Path
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    weights_sha256: str
    step: int
    epoch: int
    world_size: int
    lanes: int
    versions: dict[str, str]
    value: Any = None
    _make_model: Callable[[], torch.nn.Module] | None = field(default=None, repr=False, compare=False)

    def load_model(self) -> torch.nn.Module:
        """The trained model on the CPU, without any wrapper."""
        assert self._make_model is not None
        model = self._make_model()
        safetensors.torch.load_model(model, RunFolder(self.run_dir).weights)
        return model


def write(folder: RunFolder, model: torch.nn.Module, value: Any, **facts: Any) -> None:
    """Leave the weights, what `train_fn` returned and `result.json`, in this order. Rank 0 only."""
    partial = folder.weights.with_name(f".{folder.weights.name}")
    safetensors.torch.save_model(model, str(partial))
    partial.replace(folder.weights)
    if value is not None:
        try:
            write_private(folder.value, cloudpickle.dumps(value))
        except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
            warnings.warn(f"what train_fn returned does not pickle, so result.value is None: {error}", stacklevel=2)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(folder.result, {**facts, "weights_sha256": weights_sha256(model.state_dict()), "versions": versions})


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


def weights_sha256(state: Mapping[str, Any]) -> str:
    """SHA-256 over a state dict in name order: name, dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256()
    for name in sorted(name for name, value in state.items() if isinstance(value, torch.Tensor)):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
