"""What a worker must run, as one private file: a task, and the config with its functions and its data.

Large arrays, the columns of a DataFrame among them, lie behind the pickle as they are in memory. The ranks of one
machine map the file, so they share a single copy until one of them writes to it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from paceline.config import Config
from paceline.travel import explain, obstacle

Task = Callable[..., None]  # (config, folder, world, progress): what every rank does
ALIGNMENT = 64  # numpy and torch read aligned data fastest


@dataclass(frozen=True)
class Job:
    """A task and its config as bytes: a header to unpickle, and the arrays that follow it."""

    header: bytes
    buffers: list[pickle.PickleBuffer]


def pack(config: Config, task: Task) -> Job:
    """The job of a config, or TravelError with the path to what does not pickle."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        payload = cloudpickle.dumps((config, task), protocol=5, buffer_callback=buffers.append)
    except Exception:
        for key, value in config.__dict__.items():
            if obstacle(value) is not None:
                raise explain(key, value) from None
        raise
    sizes = [buffer.raw().nbytes for buffer in buffers]
    header = pickle.dumps({"sys_path": sys.path, "payload": payload, "sizes": sizes})
    return Job(header, buffers)


def save(job: Job, path: Path) -> None:
    """Write a job where only its owner can read it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(job.header)
        for buffer in job.buffers:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(buffer.raw())


def load(path: Path) -> tuple[Config, Task]:
    """Read a job back; arrays are views of the mapped file, private to this process once written to."""
    with path.open("rb") as file:
        header = pickle.load(file)
        position = file.tell()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers = []
    for size in header["sizes"]:
        position += -position % ALIGNMENT
        buffers.append(view[position : position + size])
        position += size
    # Functions of importable modules are pickled by name, so the ranks must look where the caller looked.
    sys.path[:] = header["sys_path"]
    config, task = pickle.loads(header["payload"], buffers=buffers)
    return config, task
