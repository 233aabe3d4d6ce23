"""Data that is prepared once: one process computes it and writes a file; the others wait for the file and map it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file

from paceline.errors import DataError
from paceline.run.checked_files import sha256_of_file
from paceline.run.tensor_files import write_tensors
from paceline.system.home import in_home

PARTIAL_SUFFIX = ".partial"
POLL_S = 0.05
REPORT_EVERY_S = 2.0


def cached_tensors(name: str, make: Callable[[], dict[str, torch.Tensor]], *inputs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of `make()`, which one process computes for all and stores in $PACELINE_HOME/cache.

    `inputs` is everything that the tensors depend on: numbers, text, files and folders (as `Path`, compared by their
    content), and lists and dicts of them. `make` is called again when any of it changes. Not a collective: one rank
    may call it alone.
    """
    path = in_home("cache").resolve() / f"{name}-{_digest(inputs)[:20]}.safetensors"
    if not path.exists():
        with _locked(path, name) as is_locked:
            if is_locked:
                _remove_partial_files(path)
            if not path.exists():
                _publish(path, make())
    tensors: dict[str, torch.Tensor] = load_file(path)  # memory-mapped: the processes of a machine share one copy
    return tensors


def _digest(value: Any) -> str:
    """Return a hash of a value's content."""
    if isinstance(value, Path):
        files = sorted(each for each in value.rglob("*") if each.is_file()) if value.is_dir() else [value]
        return _digest({str(file.relative_to(value)): sha256_of_file(file) for file in files})
    if isinstance(value, (list, tuple)):
        # Plain items are hashed together: a million sentences do not need a million hashes.
        value = [_digest(each) if isinstance(each, (Path, list, tuple, dict)) else each for each in value]
    elif isinstance(value, dict):
        value = {key: _digest(each) for key, each in value.items()}
    try:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()
    except TypeError:
        raise TypeError(f"inputs are paths, numbers, text, and lists and dicts of them; got {value!r:.80}") from None


@contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock of a file, and report while waiting for it; yield False on a file system without locks."""
    with _writes_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    with file:  # the kernel releases the lock when the process ends
        started = reported = time.monotonic()
        while (is_locked := _try_lock(file)) is None:
            time.sleep(POLL_S)
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                print(f"{name}: waiting for another process to prepare it ({reported - started:.0f} s)", flush=True)
        yield is_locked


def _try_lock(file: IO[str]) -> bool | None:
    """Return True if the lock was taken, None if another process holds it, False if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def _publish(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the file atomically. Without locks several processes may do so, with the same content."""
    partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}{PARTIAL_SUFFIX}")
    with _writes_to(path):
        write_tensors(partial, {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        partial.replace(path)


def _remove_partial_files(path: Path) -> None:
    """Remove the files that processes were writing when they were killed."""
    for partial in path.parent.glob(f"{path.stem}.*{PARTIAL_SUFFIX}"):
        partial.unlink(missing_ok=True)


@contextmanager
def _writes_to(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path.parent} cannot be written to: {reason}; set PACELINE_HOME to another folder") from None
