"""The job file that the ranks read: the task to run, and the config with its functions and data.

Large arrays, such as the columns of a DataFrame, are stored after the pickle as raw memory. The ranks of one machine
map the file, so they share a single copy until one of them writes to it.
"""

from __future__ import annotations

import importlib
import io
import itertools
import mmap
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _make_function

from paceline.config import Config
from paceline.run.pickling import pickle_failure, pickling_error

ALIGNMENT = 64  # numpy and torch read aligned data fastest


@dataclass(frozen=True)
class Task:
    """The work of every rank: a function of (config, folder, world, progress) and the options.

    It is named as "module:function" and imported in the ranks, so a launcher does not load what only ranks need.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> None:
        module, _, function = self.name.partition(":")
        getattr(importlib.import_module(module), function)(*arguments, **self.options)


@dataclass(frozen=True)
class Job:
    """A pickled task and config: a header, and the raw arrays that follow it."""

    header: bytes
    buffers: list[pickle.PickleBuffer]


def pack(config: Config, task: Task) -> Job:
    """Pickle a task and its config; raises PicklingError with the path to the part that cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        payload = cloudpickle.dumps((config, task), protocol=5, buffer_callback=buffers.append)
    except Exception:
        for key, value in config.__dict__.items():
            if pickle_failure(value) is not None:
                raise pickling_error(key, value) from None
        raise
    sizes = [buffer.raw().nbytes for buffer in buffers]
    header = pickle.dumps({"sys_path": sys.path, "argv": sys.argv, "payload": payload, "sizes": sizes})
    return Job(header, buffers)


def save(job: Job, path: Path) -> None:
    """Write a job into a new file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(job.header)
        for buffer in job.buffers:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(buffer.raw())


def load(path: Path) -> tuple[Config, Task]:
    """Read a job; arrays are views of the mapped file, and writing to one changes only this process's copy."""
    with path.open("rb") as file:
        header = pickle.load(file)
        position = file.tell()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers = []
    for size in header["sizes"]:
        position += -position % ALIGNMENT
        buffers.append(view[position : position + size])
        position += size
    # Functions of importable modules are pickled by name, so the ranks need the import path of the caller.
    sys.path[:] = header["sys_path"]
    sys.argv[:] = header["argv"]  # the user's functions may read options of the script
    config, task = _Unpickler(header["payload"], buffers).load()
    return config, task


_numbers = itertools.count()


class _Unpickler(pickle.Unpickler):
    """Unpickles functions of the user's script into a new module, whose namespace becomes their globals.

    torch.compile looks up the globals of a function in the module that `__name__` names. cloudpickle leaves `__main__`
    there, which is another program in a rank.
    """

    def __init__(self, payload: bytes, buffers: Iterable[memoryview]) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers)
        # The new module and its name, by the id of the globals in the pickle: functions of one script share them.
        self._modules: dict[int, tuple[str, ModuleType]] = {}

    def load(self) -> Any:
        content = super().load()
        for name, module in self._modules.values():  # unpickling a function that uses `__name__` overwrites it
            module.__name__ = name
        return content

    def find_class(self, module_name: str, name: str) -> Any:
        found = super().find_class(module_name, name)
        return self._make_function if found is _make_function else found

    def _make_function(self, code: CodeType, names: dict[str, Any], *rest: Any) -> FunctionType:
        if names.get("__name__") == "__main__":
            names = vars(self._module_for(names))
        function: FunctionType = _make_function(code, names, *rest)
        return function

    def _module_for(self, names: dict[str, Any]) -> ModuleType:
        if id(names) not in self._modules:
            name = f"_paceline_main_{next(_numbers)}"
            module = sys.modules[name] = ModuleType(name)
            vars(module).update({**names, "__name__": name})
            self._modules[id(names)] = name, module
        return self._modules[id(names)][1]
