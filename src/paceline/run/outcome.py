"""The results of ranks for their launcher, as files in the run folder: a value, `result.json`, or why they stopped."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from paceline.run.atomic_files import write_private
from paceline.run.layout import RunFolder
from paceline.run.result_file import ResultFile, read_result

if TYPE_CHECKING:
    import numpy as np
    import torch


class Predictions(NamedTuple):
    """A model's outputs, and the index of each sample in the user's data set."""

    indices: np.ndarray[Any, np.dtype[np.int64]]
    outputs: torch.Tensor


def write_value(folder: RunFolder, value: Any) -> None:
    """Write the return value of a task: as JSON if that preserves it exactly, else pickled. Rank 0 only."""
    text = _to_json(value)
    if text is not None:
        write_private(folder.value, text.encode())
        return
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        warnings.warn(f"the return value of train_fn cannot be pickled, so result.value is None: {error}", stacklevel=2)
    else:
        write_private(folder.pickled_value, content)


def _to_json(value: Any) -> str | None:
    """A value as JSON; None if JSON would change it."""
    try:
        return json.dumps(value) if _is_plain(value) else None
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return None


def _is_plain(value: Any) -> bool:
    """Whether JSON preserves all types: a tuple would become a list, and a numpy number a Python number."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


@dataclass(frozen=True)
class ReturnValue:
    """The return value of a task, as the bytes of its file. A pickle can run code, so it is only read by `load`."""

    content: bytes
    is_pickled: bool

    def load(self) -> Any:
        """The value itself; None with a warning if it cannot be unpickled."""
        if not self.is_pickled:
            return json.loads(self.content)
        try:
            return pickle.loads(self.content)
        except Exception as error:  # noqa: BLE001 - any object may raise anything when it is unpickled
            warnings.warn(
                f"the return value of train_fn cannot be unpickled, so result.value is None: {error}", stacklevel=2
            )
            return None


@dataclass(frozen=True)
class Outcome:
    """The files that a task wrote at its end, in a form that can be sent to another process."""

    run_dir: Path
    facts: ResultFile | None
    value: ReturnValue | None
    stopped: str | None  # the content of `stopped.json`, if the run was stopped on request

    def load_value(self) -> Any:
        """The value that rank 0 returned; None if there is none."""
        return self.value.load() if self.value is not None else None


def collect(folder: RunFolder) -> Outcome:
    """Read the files that rank 0 has written into the run folder since the ranks started."""
    stopped = folder.stopped.read_text(encoding="utf-8") if folder.stopped.exists() else None
    is_pickled = folder.pickled_value.exists()
    path = folder.pickled_value if is_pickled else folder.value
    value = ReturnValue(path.read_bytes(), is_pickled) if path.exists() else None
    return Outcome(folder.path, read_result(folder.result), value, stopped)
