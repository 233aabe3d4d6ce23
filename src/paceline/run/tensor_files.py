"""Writes tensors as a safetensors file, with its checksum."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.run.checked_files import CHUNK, FileRecord, write

# The names of dtypes in the safetensors format.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def can_hold(value: object) -> bool:
    """Whether the safetensors format can store a value: a dense tensor of a known dtype."""
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.layout is torch.strided


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write contiguous CPU tensors as a safetensors file.

    The bytes are written straight from memory. The library's own writer copies each tensor while it holds the GIL,
    which would delay the training in the main thread.
    """
    # The largest elements first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write(path, _chunks([len(text).to_bytes(8, "little") + text, *(_bytes_of(tensors[name]) for name in names)]))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The parts in pieces, between which other threads can run."""
    for part in parts:
        view = memoryview(part)
        yield from (view[first : first + CHUNK] for first in range(0, len(view), CHUNK))
