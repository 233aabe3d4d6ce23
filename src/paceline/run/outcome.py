"""What a task returns to its caller: a value in a file of the run folder, `result.json`, or why the run stopped."""

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
    """A model's outputs, and which samples of the user's data set they are of."""

    indices: np.ndarray[Any, np.dtype[np.int64]]
    outputs: torch.Tensor


def write_value(folder: RunFolder, value: Any) -> None:
    """Leave what a task returns to its caller: as JSON if it comes back as it is, else pickled. Rank 0 only."""
    text = _to_json(value)
    if text is not None:
        write_private(folder.value, text.encode())
        return
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        warnings.warn(f"what train_fn returned does not pickle, so result.value is None: {error}", stacklevel=2)
    else:
        write_private(folder.pickled_value, content)


def _to_json(value: Any) -> str | None:
    """A value as JSON; None if it would come back as something else."""
    try:
        return json.dumps(value) if _is_plain(value) else None
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return None


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the types: a tuple would come back as a list, a number of numpy as one of Python."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


@dataclass(frozen=True)
class Value:
    """What a task has returned, as the bytes of its file. A pickle is executed when it is loaded, and only then."""

    content: bytes
    is_pickled: bool

    def load(self) -> Any:
        """The value itself; None with a warning if it cannot be made again."""
        if not self.is_pickled:
            return json.loads(self.content)
        try:
            return pickle.loads(self.content)
        except Exception as error:  # noqa: BLE001 - any object may raise anything when it is made again
            warnings.warn(f"what train_fn returned does not unpickle, so result.value is None: {error}", stacklevel=2)
            return None


@dataclass(frozen=True)
class Outcome:
    """What a task has left, which any process can be sent: `result.json` and the value."""

    run_dir: Path
    facts: ResultFile | None
    value: Value | None
    stopped: str | None  # why and where, if the run was stopped on request

    def load_value(self) -> Any:
        """The value that rank 0 left."""
        return self.value.load() if self.value is not None else None


def collect(folder: RunFolder) -> Outcome:
    """What rank 0 has left in the run folder since the ranks started."""
    stopped = folder.stopped.read_text(encoding="utf-8") if folder.stopped.exists() else None
    is_pickled = folder.pickled_value.exists()
    path = folder.pickled_value if is_pickled else folder.value
    value = Value(path.read_bytes(), is_pickled) if path.exists() else None
    return Outcome(folder.path, read_result(folder.result), value, stopped)
