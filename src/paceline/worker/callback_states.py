"""The states of callbacks in checkpoints: a copy of each, under the name of its class."""

from __future__ import annotations

import copy
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.callbacks import Callback
from paceline.data.trees import TreePath, map_leaves
from paceline.errors import ConfigError
from paceline.observe.failures import raising_config_errors


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Copies of the states, because a checkpoint is written while callbacks change."""
    return {name: _state_of(name, callback) for name, callback in _named(callbacks).items()}


def _state_of(name: str, callback: Callback) -> Any:
    """A copy of the state of a callback, checked to fit in a checkpoint."""
    with raising_config_errors(f"the state_dict() of callback {name}"):
        state = callback.state_dict()
    return check_plain(f"the state_dict() of callback {name}", state)


def copied(what: str, state: Any) -> Any:
    """A copy of a state, which changes while a checkpoint is written; errors name it `what`."""
    try:
        return map_leaves(state, _copied)
    except Exception as error:  # noqa: BLE001 - any object may raise anything when it is copied
        raise _unsaved(what, error) from None


def _copied(_: TreePath, leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, np.generic) else copy.deepcopy(leaf)


def restore_states(callbacks: Sequence[Callback], saved: Mapping[str, Any]) -> list[str]:
    """Restore each callback from the state under its name; returns the names of states without a callback."""
    named = _named(callbacks)
    for name, callback in named.items():
        if saved.get(name):
            with raising_config_errors(f"the load_state_dict() of callback {name}"):
                callback.load_state_dict(saved[name])
    return [name for name, state in saved.items() if state and name not in named]


def check_plain(what: str, state: Any) -> Any:
    """A copy of a state; a ConfigError if a checkpoint could not store or restore it."""
    buffer, copy_of_state = io.BytesIO(), copied(what, state)
    try:
        torch.save(copy_of_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - any object may raise anything when it is pickled
        raise _unsaved(what, error) from None
    return copy_of_state


def _unsaved(what: str, error: Exception) -> ConfigError:
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))  # torch prints parts of it in bold
    found = re.search(r"GLOBAL ([\w.]+)", text)
    reason = f"it has a {found[1]}" if found else f"{type(error).__name__}: {text[:100]}"
    return ConfigError(
        f"{what} cannot be in a checkpoint ({reason}); use numbers, strings, tensors, and lists and dicts of them"
    )


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by class name, numbered from the second one of a class."""
    seen: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name} {seen[name]}"] = callback
    return named
