"""Data that is prepared once: one process makes it and writes a file, all others wait for the file and map it."""

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
from paceline.run.tensor_files import sha256_of_file, write_tensors
from paceline.system.home import in_home

PARTIAL = ".partial"
POLL_S = 0.05
TELL_AFTER_S = 2.0


def cached_tensors(name: str, make: Callable[[], dict[str, torch.Tensor]], *inputs: Any) -> dict[str, torch.Tensor]:
    """The tensors of `make()`, made by one process for all that ask, now and later, and kept in $PACELINE_HOME/cache.

    `inputs` is all that they depend on: files and folders, as `Path`, count by their content; so do numbers, text, and
    lists and dicts of them. `make` is called anew when any of it changes. No collective: a rank may ask alone.
    """
    path = in_home("cache").resolve() / f"{name}-{_digest(inputs)[:20]}.safetensors"
    if not path.exists():
        with _alone(path, name) as is_alone:
            if is_alone:
                _clean(path)
            if not path.exists():
                _publish(path, make())
    tensors: dict[str, torch.Tensor] = load_file(path)  # mapped: processes of one machine have it in memory once
    return tensors


def _digest(value: Any) -> str:
    """What tells this value from others, by content."""
    if isinstance(value, Path):
        files = sorted(each for each in value.rglob("*") if each.is_file()) if value.is_dir() else [value]
        return _digest({str(file.relative_to(value)): sha256_of_file(file) for file in files})
    if isinstance(value, (list, tuple)):
        # One hash over all parts, so that a million sentences need no million hashes.
        value = [_digest(each) if isinstance(each, (Path, list, tuple, dict)) else each for each in value]
    elif isinstance(value, dict):
        value = {key: _digest(each) for key, each in value.items()}
    try:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()
    except TypeError:
        raise TypeError(f"inputs are paths, numbers, text, and lists and dicts of them; got {value!r:.80}") from None


@contextmanager
def _alone(path: Path, name: str) -> Iterator[bool]:
    """Let one process in at a time; those that wait say so. False on a file system without locks."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    with file:  # the kernel lets go of the lock with the process
        began = told = time.monotonic()
        while (is_alone := _take(file)) is None:
            time.sleep(POLL_S)
            if time.monotonic() - told > TELL_AFTER_S:
                told = time.monotonic()
                print(f"{name}: another process prepares it, since {told - began:.0f} s", flush=True)
        yield is_alone


def _take(file: IO[str]) -> bool | None:
    """Whether the lock was taken; None if another process has it, False if there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def _publish(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the file whole or not at all; without locks several may do so, each the same."""
    partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}{PARTIAL}")
    with _writing(path):
        write_tensors(partial, {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        partial.replace(path)


def _clean(path: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for partial in path.parent.glob(f"{path.stem}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path.parent} cannot be written to: {reason}; set PACELINE_HOME to another folder") from None
