"""The files of a checkpoint's state: their tensors, the rank that writes each file, and loading them.

Tensors are in safetensors files, which depend on the sizes of the tensors and not on the number of ranks. The plain
values are in a small file that loads with `weights_only=True`.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from paceline.checkpoint.state import CheckpointState, Tensors
from paceline.engine.sharding import Transfer, balanced_owners
from paceline.run import checked_files
from paceline.run.checked_files import FileRecord

MAX_FILE_BYTES = 128 << 20  # small enough to divide the work among ranks, large enough for sequential writes
VALUES_FILE = "state.pt"


@dataclass(frozen=True)
class TensorFile:
    """One file of a checkpoint, and the tensors of one group that are stored in it."""

    name: str
    group: str
    tensor_names: tuple[str, ...]
    nbytes: int


def split_into_files(state: CheckpointState) -> list[TensorFile]:
    """Return the files of a state: each group's tensors in their order, cut where a file would exceed the limit."""
    files = []
    for group, tensors in state.groups.items():
        parts: list[list[str]] = [[]]
        filled = 0
        for name, tensor in tensors.items():
            if filled + tensor.nbytes > MAX_FILE_BYTES and parts[-1]:
                parts.append([])
                filled = 0
            parts[-1].append(name)
            filled += tensor.nbytes
        for number, names in enumerate(parts, start=1):
            suffix = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            nbytes = sum(tensors[name].nbytes for name in names)
            files.append(TensorFile(f"{group}{suffix}.safetensors", group, tuple(names), nbytes))
    return files


def files_of_rank(rank: int, world_size: int, files: Sequence[TensorFile]) -> list[TensorFile]:
    """Return the files that a rank writes, so that all ranks write about as many bytes (pure)."""
    ordered = sorted(files, key=lambda file: file.name)
    writers = balanced_owners([file.nbytes for file in ordered], world_size)
    return [file for file, writer in zip(ordered, writers, strict=True) if writer == rank]


def transfers_to_writers(state: CheckpointState, world_size: int) -> list[Transfer]:
    """Return the transfers of a sharded optimizer's tensors from their owners to the ranks that write them (pure)."""
    files = split_into_files(state)
    writers = {
        name: rank
        for rank in range(world_size)
        for file in files_of_rank(rank, world_size, files)
        if file.group == "optimizer"
        for name in file.tensor_names
    }
    return [Transfer(name, owner, writers[name]) for name, owner in state.owners.items() if owner != writers[name]]


def write_values(folder: Path, state: CheckpointState) -> FileRecord:
    """Write the plain values; raise if they cannot be read back, such as objects in a module's extra state."""
    buffer = io.BytesIO()
    torch.save(state.values, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return checked_files.write(folder / VALUES_FILE, [buffer.getbuffer()])


def load(path: Path, only: Collection[str] | None = None) -> CheckpointState:
    """Return the state in a checkpoint's folder, on the CPU; with `only`, just the tensors of these groups."""
    values = torch.load(path / VALUES_FILE, weights_only=True, map_location="cpu")
    groups: dict[str, Tensors] = {}
    for file in sorted(path.glob("*.safetensors")):
        group = file.name.removesuffix(".safetensors").partition("-")[0]
        if only is None or group in only:
            groups.setdefault(group, {}).update(safetensors.torch.load_file(file))
    return CheckpointState(groups, values)


def has_ema(path: Path) -> bool:
    """Whether a checkpoint contains an average of the weights."""
    return any(path.glob("ema*.safetensors"))
