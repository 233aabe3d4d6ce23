"""The weights of a model as one safetensors file, for the end of a run and for other programs.

Every tensor is there once. The other names of tied ones, and what the format has no words for, are in its metadata.
"""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import safetensors
import torch

from paceline.checkpoint.state import put_trained, put_values, unshared
from paceline.engine.digest import sha256_of
from paceline.run import tensor_files

REST = "paceline.rest"  # pickled by torch, in base64: extra states, and tensors of other types


def save_weights(model: torch.nn.Module, path: Path) -> str:
    """Write a file of weights that is seen whole or not at all; returns their fingerprint."""
    kept, metadata = unshared(model.state_dict())
    tensors = {name: value for name, value in kept.items() if tensor_files.can_hold(value)}
    if rest := {name: value for name, value in kept.items() if name not in tensors}:
        metadata |= _pickled(rest)
    partial = path.with_name(f".{path.name}")
    tensor_files.write_tensors(partial, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    partial.replace(path)
    tensor_files.sync_folder(path.parent)
    return sha256_of(model.state_dict())


def load_weights(model: torch.nn.Module, weights: Path) -> None:
    """Give a model the weights of a file or of a checkpoint's folder."""
    if weights.is_dir():
        put_trained(weights, model)
        return
    own = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    put_values(own | _read(weights), model, weights, "give the model that was trained")


def stored_sha256(path: Path) -> str:
    """The fingerprint of the weights in a file."""
    return sha256_of(_read(path))


def _read(path: Path) -> dict[str, Any]:
    """What a file holds, as a state dict; tensors are mapped."""
    with safetensors.safe_open(path, "pt") as file:
        values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        metadata = file.metadata() or {}
    values |= {name: values[twin] for name, twin in metadata.items() if twin in values}
    return values | (_unpickled(metadata[REST], path) if REST in metadata else {})


def _pickled(rest: dict[str, Any]) -> dict[str, str]:
    """What the metadata says of it; nothing, and a warning, if it could not be read back."""
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - any object may raise anything; the weights are worth more
        warnings.warn(f"{', '.join(rest)} of the model's state cannot be saved: {error}", stacklevel=3)
        return {}
    return {REST: base64.b64encode(buffer.getbuffer()).decode()}


def _unpickled(text: str, path: Path) -> dict[str, Any]:
    try:
        buffer = io.BytesIO(base64.b64decode(text, validate=True))
        return torch.load(buffer, weights_only=True, map_location="cpu")  # type: ignore[no-any-return]
    except Exception as error:
        raise OSError(f"{path}: {REST} in its metadata is damaged") from error
