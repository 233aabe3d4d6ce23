"""Whether the code of a run may be executed. Using a trained model imports the functions that its config names.

A run is trusted if it belongs to the user and is still in the folder where it was trained. For any other run, the
error lists the code that would be executed.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from paceline.config import FUNCTION_KEYS
from paceline.config.functions import full_name, is_model_loss
from paceline.config.phases import map_functions, with_every
from paceline.errors import ConfigError
from paceline.observe.event_types import parse
from paceline.run.layout import RunFolder


def check(folder: RunFolder, raw: Mapping[str, Any], replaced: Collection[str], how: str) -> None:
    """Raise ConfigError with the code that the config `raw` names, if the run belongs to another user or was moved.

    The keys in `replaced` are not listed: they come from a config that the user gave. `how` describes how to
    proceed.
    """
    if reason := why_untrusted(folder, raw):
        listed = "".join(f"\n  {line}" for line in code_in(raw, replaced, folder.path))
        raise ConfigError(f"{folder.path} {reason}, and using it executes the code below; check it, then {how}{listed}")


def why_untrusted(folder: RunFolder, raw: Mapping[str, Any]) -> str | None:
    """The reason why the code may belong to another user; None for a run of this user that was not moved."""
    for path in (folder.path, folder.config):
        if (owner := path.stat().st_uid) != os.geteuid():
            return f"belongs to the user {_name_of(owner)}"
    if folder.fetched.exists():  # before the events, which come from the mirror, too
        return f"was downloaded from {folder.fetched.read_text(encoding='utf-8').strip()}"
    trained_in = _recorded_place(folder, raw)
    if trained_in is None:
        return "does not record where it was trained"
    # Compared as text: a relative path, or one below /proc, would resolve to a folder of this process.
    return None if trained_in == str(folder.path.resolve()) else f"was moved or copied from {trained_in}"


def code_in(raw: Mapping[str, Any], replaced: Collection[str], run_dir: Path) -> Iterator[str]:
    """One line for each function that a config names, with its file, and for a `.env` file."""
    home = Path(raw["folder"]) if isinstance(raw.get("folder"), str) else run_dir
    metrics = raw.get("metrics")
    named: dict[str, Any] = {}
    for key in FUNCTION_KEYS:
        map_functions(with_every(raw.get(key)), named.__setitem__, key)
    named |= {f"metrics.{name}": value for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    for key, name in named.items():
        if isinstance(name, str) and not is_model_loss(key, name) and key.partition(".")[0] not in replaced:
            module = full_name(key, name).partition(":")[0]
            yield f"{key}: {name!r} in {_file_of(module, home) or 'a module that is not found'}"
    if (home / ".env").is_file():
        yield f"environment variables in {home / '.env'}"


def _recorded_place(folder: RunFolder, raw: Mapping[str, Any]) -> str | None:
    """The run folder that the ranks recorded at their last start; else the `run_dir` of the config."""
    recorded = raw.get("run_dir")
    if folder.events.exists():
        with folder.events.open("rb") as lines:
            for line in lines:
                # Most lines do not match, and parsing them all would be slow.
                if b'"run_started"' in line and (event := parse(line)) is not None:
                    recorded = event.get("run_dir", recorded)
    return recorded if isinstance(recorded, str) else None


def _file_of(module: str, home: Path) -> str | None:
    """The file of a module, found without importing anything."""
    found, places, parts = None, [str(home), *sys.path], module.split(".")
    for count in range(1, len(parts) + 1):
        try:
            found = PathFinder.find_spec(".".join(parts[:count]), places)
        except (ImportError, OSError, ValueError):  # not a valid name of a module
            return None
        if found is None:
            return "Python itself" if parts[0] in sys.builtin_module_names else None
        places = list(found.submodule_search_locations or ())
    return found.origin if found is not None else None


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
