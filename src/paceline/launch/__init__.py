"""Starts the ranks of a run and watches them: local processes, torchrun, Slurm, Ray, several hosts.

Owns processes, signals, restarts and what the environment says about them. Promises that no process outlives its run,
and that the first failure is the one that is reported. Must not know models or data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.errors import Interrupted, MissingExtra, PacelineError, Stopped
from paceline.launch import processes
from paceline.launch.environment import join_step, load_dotenv, pick_launcher, shares_cores
from paceline.system.startup import requests_noted

if TYPE_CHECKING:
    from paceline.run.job import Task
    from paceline.run.outcome import Outcome


def prepare(raw: Mapping[str, Any], folder: Path) -> None:
    """Begin what takes time: a process that imports torch for local ranks, while this one still does so for itself.

    `raw` holds the keys of a config that may not have been checked yet.
    """
    if raw.get("nodes") is not None:  # the head serves a store, which complains of clients without a name
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if pick_launcher(raw.get("launcher", "auto"), has_rendezvous=raw.get("rendezvous") is not None) == "local":
        load_dotenv(folder)
        is_passive = shares_cores(raw.get("ddp", True), raw.get("procs")) or raw.get("nodes") is not None
        processes.prepare(is_passive=is_passive)


def start(config: Config, task: Task, folder: Path) -> Outcome:
    """Do a task with the launcher that the config or the environment asks for; `folder` may hold a `.env` file."""
    from paceline.world import is_joined

    if is_joined():
        raise PacelineError("start() was called inside a rank; call it in the script that starts the run")
    launcher = pick_launcher(config.launcher, has_rendezvous=config.rendezvous is not None)
    load_dotenv(folder)
    if launcher == "slurm":
        join_step()
    with requests_noted():
        if launcher in ("torchrun", "slurm"):
            from paceline.launch import torchrun as chosen
        elif launcher == "ray":
            if find_spec("ray") is None:
                raise MissingExtra("ray", "ray", "launcher=ray")
            from paceline.launch import ray as chosen  # type: ignore[no-redef]
        elif config.rendezvous is not None:
            from paceline.launch.cluster import roles as chosen  # type: ignore[no-redef]
        else:
            from paceline.launch import local as chosen  # type: ignore[no-redef]
    outcome: Outcome = chosen.start(config, task)
    if outcome.stopped is not None:
        raise stopped_error(outcome)
    return outcome


def stopped_error(outcome: Outcome) -> PacelineError:
    """The error for a run that was stopped on request."""
    facts = json.loads(outcome.stopped or "{}")
    text = f"stopped by {facts['reason']} at step {facts['step']}"
    if facts["is_saved"]:
        return Stopped(f"{text}; checkpoint saved; resume with --resume {quote(str(outcome.run_dir))}")
    return Interrupted(f"{text}, but its state could not be saved; an earlier checkpoint may be in {outcome.run_dir}")
