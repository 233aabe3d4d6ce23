"""The weights of a model as one safetensors file, written at the end of a run and readable by other programs.

Every tensor is stored once. The further names of tied tensors, and values that safetensors cannot store, are in the
file's metadata.
"""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import safetensors
import torch

from paceline.checkpoint.files import load
from paceline.checkpoint.state import load_fitting, restore_weights, split_aliases
from paceline.engine.digest import sha256_of
from paceline.run import tensor_files
from paceline.run.atomic_files import sync_folder

PICKLED = "paceline.rest"  # the metadata key of pickled values, in base64: extra states, tensors of other dtypes
ADVICE = "use the model that was trained"


def save_weights(model: torch.nn.Module, path: Path) -> str:
    """Write the weights to a file atomically; return their SHA-256."""
    values, metadata = split_aliases(model.state_dict())
    tensors = {name: value for name, value in values.items() if tensor_files.can_hold(value)}
    if others := {name: value for name, value in values.items() if name not in tensors}:
        metadata |= _pickle(others)
    partial = path.with_name(f".{path.name}")
    tensor_files.write_tensors(partial, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    partial.replace(path)
    sync_folder(path.parent)
    return sha256_of(model.state_dict())


def load_weights(model: torch.nn.Module, weights: Path) -> None:
    """Load the weights of a file, or of a checkpoint's folder, into a model."""
    if weights.is_dir():
        _load_checkpoint(model, weights)
        return
    extra_states = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    load_fitting(model, extra_states | _read(weights), weights, ADVICE)


def stored_sha256(path: Path) -> str:
    """Return the SHA-256 of the weights in a file."""
    return sha256_of(_read(path))


@torch.no_grad()
def _load_checkpoint(model: torch.nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint, or their average if the run kept one."""
    state = load(path, only=("weights", "ema"))
    restore_weights(state, model, path, ADVICE)
    parameters = dict(model.named_parameters())
    for name, average in state.groups.get("ema", {}).items():
        parameters[name].copy_(average)


def _read(path: Path) -> dict[str, Any]:
    """Return the state dict in a file; its tensors are memory-mapped."""
    with safetensors.safe_open(path, "pt") as file:
        values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        metadata = file.metadata() or {}
    values |= {name: values[kept] for name, kept in metadata.items() if kept in values}
    return values | (_unpickle(metadata[PICKLED], path) if PICKLED in metadata else {})


def _pickle(values: dict[str, Any]) -> dict[str, str]:
    """Return the metadata entry for values; empty, with a warning, if they could not be read back."""
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - any object may raise anything, and the weights must still be written
        warnings.warn(f"{', '.join(values)} of the model's state cannot be saved: {error}", stacklevel=3)
        return {}
    return {PICKLED: base64.b64encode(buffer.getbuffer()).decode()}


def _unpickle(text: str, path: Path) -> dict[str, Any]:
    """Return the values of a metadata entry."""
    try:
        buffer = io.BytesIO(base64.b64decode(text, validate=True))
        return torch.load(buffer, weights_only=True, map_location="cpu")  # type: ignore[no-any-return]
    except Exception as error:
        raise OSError(f"{path}: {PICKLED} in its metadata is damaged") from error
