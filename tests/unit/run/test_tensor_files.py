from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.run import atomic_files, checked_files, tensor_files
from paceline.run.checked_files import FileRecord, sha256_of_file, write
from paceline.run.tensor_files import DTYPES, write_tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, so that NaN equals NaN."""
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, width), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_by_the_safetensors_library(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": random_bits(dtype, 3, 5), "scalar": random_bits(dtype, 1)[0], "empty": random_bits(dtype, 0, 4)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)


def test_a_file_holds_tensors_of_several_dtypes_under_any_names(tmp_path: Path) -> None:
    names = ["layers.0.weight", "größe", 'a "quoted" name', "state.0.exp_avg", " ", "a/b\\c", "__x__"]
    tensors = {name: random_bits(dtype, 1 + n, 3) for n, (name, dtype) in enumerate(zip(names, DTYPES, strict=False))}
    write_tensors(tmp_path / "x.safetensors", tensors)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.float64), "c": torch.zeros(1)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    content = (tmp_path / "x.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    offsets = {name: facts["data_offsets"][0] for name, facts in json.loads(content[8:begin]).items()}
    assert all((begin + offsets[name]) % tensor.element_size() == 0 for name, tensor in tensors.items())
    assert len(content) == begin + 8 + 4 + 3


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {})
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


def test_parameters_that_require_a_gradient_are_written(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 2))
    write_tensors(tmp_path / "x.safetensors", {"w": weight})
    assert same(safetensors.torch.load_file(tmp_path / "x.safetensors")["w"], weight.detach())


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 22])
def test_size_and_checksum_do_not_depend_on_the_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tensor_files, checked_files):
        monkeypatch.setattr(module, "CHUNK", chunk)
    path = tmp_path / "x.safetensors"
    written = write_tensors(path, {"a": torch.arange(50.0), "b": torch.arange(3, dtype=torch.int8)})
    content = path.read_bytes()
    assert written == FileRecord("x.safetensors", len(content), hashlib.sha256(content).hexdigest())
    assert sha256_of_file(path) == written.sha256
    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.arange(50.0))


def test_a_file_is_flushed_to_the_disk_before_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    write(tmp_path / "x", [b"abc", memoryview(b"de")])
    assert synced == [5]


def test_a_disk_that_loses_bytes_is_detected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: os.ftruncate(handle, 2))
    with pytest.raises(OSError, match="x differs from the data written to it"):
        write(tmp_path / "x", [b"abc"])


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "x", [b"abc"])
    with pytest.raises(OSError, match="Input/output error"):
        atomic_files.sync_folder(tmp_path)


def test_a_rewritten_file_has_only_the_new_content(tmp_path: Path) -> None:
    write(tmp_path / "x", [b"long content"])
    written = write(tmp_path / "x", [b"short"])
    assert (tmp_path / "x").read_bytes() == b"short"
    assert written.size == 5
