"""Starts the ranks of a run and watches them: local processes, torchrun, Slurm, Ray, several hosts.

Owns the processes of a run, their restarts, and the environment from which they are started. Promises that no process
outlives its run, and that the first failure is the one that is reported. Must not depend on what
the ranks compute.

A launcher is a function `start(config, task) -> Outcome`. Other packages add launchers by entry points of the group
`paceline.launchers`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, MissingExtra, PacelineError, Stopped
from paceline.launch import processes
from paceline.launch.environment import load_dotenv, pick_launcher, report_unused, shares_cores
from paceline.system.signals import requests_deferred

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.run.job import Task
    from paceline.run.outcome import Outcome

GROUP = "paceline.launchers"
LAUNCHERS = {
    "local": "paceline.launch.local:start",
    "torchrun": "paceline.launch.torchrun:start",
    "slurm": "paceline.launch.torchrun:start_in_step",
    "ray": "paceline.launch.ray:start",
}


def launchers() -> dict[str, EntryPoint]:
    """All launchers by name, not loaded: Paceline's own, then those of other packages with other names."""
    built_in = [EntryPoint(name, value, GROUP) for name, value in LAUNCHERS.items()]
    others = [entry for entry in metadata.entry_points(group=GROUP) if entry.name not in LAUNCHERS]
    return {entry.name: entry for entry in built_in + others}


def unknown_launcher(config: Config) -> Iterator[str]:
    """One sentence with the known names if the config names an unknown launcher."""
    if config.launcher not in ("auto", *LAUNCHERS) and config.launcher not in (known := launchers()):
        *names, last = map(repr, ("auto", *known))
        yield f"launcher={config.launcher!r} must be {', '.join(names)} or {last}"


def prepare(raw: Mapping[str, Any], folder: Path) -> None:
    """Start a process early that imports torch for local ranks, while this process imports it too.

    `raw` has the keys of a config that may not have been checked yet.
    """
    if raw.get("nodes") is not None:  # the coordinator serves a store, which logs errors for clients without a name
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    load_dotenv(folder)
    if pick_launcher(raw.get("launcher", "auto"), has_rendezvous=raw.get("rendezvous") is not None) == "local":
        is_passive = shares_cores(raw.get("ddp", True), raw.get("procs")) or raw.get("nodes") is not None
        processes.prepare(is_passive=is_passive)


def start(config: Config, task: Task, folder: Path) -> Outcome:
    """Run a task with the launcher that the config or the environment selects; `folder` may contain a `.env` file."""
    from paceline.world import is_joined

    if is_joined():
        raise PacelineError("start() was called inside a rank; call it in the script that starts the run")
    load_dotenv(folder)
    name = pick_launcher(config.launcher, has_rendezvous=config.rendezvous is not None)
    if name == "local" and config.rendezvous is None:
        report_unused(folder)
    if problems := list(unknown_launcher(config)):
        raise ConfigError(problems)
    with requests_deferred():
        start_ranks = _load(name)
    outcome = start_ranks(config, task)
    if outcome.stopped is not None:
        raise stopped_error(outcome)
    return outcome


def _load(name: str) -> Callable[[Config, Task], Outcome]:
    """Import a launcher."""
    try:
        return launchers()[name].load()  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if name in LAUNCHERS and error.name == name:  # the extra is named after the launcher
            raise MissingExtra(name, name, f"launcher={name}") from None
        raise
    except AttributeError as error:
        raise ConfigError(f"launcher={name} cannot be loaded: {error}; fix its entry point in {GROUP}") from None


def stopped_error(outcome: Outcome) -> PacelineError:
    """The error for a run that was stopped on request."""
    facts = json.loads(outcome.stopped or "{}")
    text = f"stopped by {facts['reason']} at step {facts['step']}"
    if facts["is_saved"]:
        return Stopped(f"{text}; checkpoint saved; resume with --resume {quote(str(outcome.run_dir))}")
    return Interrupted(f"{text}, but its state could not be saved; an earlier checkpoint may be in {outcome.run_dir}")
