"""The environment: how this process was started, its cores, and a `.env` file."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from paceline.errors import ConfigError
from paceline.launch.network import variables_towards
from paceline.launch.slurm import is_step, world_of

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # set by what starts a rank


_from_dotenv: dict[str, str] = {}  # the variables that `load_dotenv` has set


def load_dotenv(folder: Path) -> None:
    """Set variables from a `.env` file beside the config, such as MASTER_ADDR; variables that are already set are kept.

    Those of an earlier call are removed first, so a notebook can start runs after the file was edited, and runs of
    several folders. Variables such as RANK make a process a rank. In a `.env` file, which all processes share, they
    apply to ranks only.
    """
    for name, value in _from_dotenv.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _from_dotenv.clear()
    is_rank = "RANK" in os.environ
    for name, value in _dotenv(folder).items():
        if (is_rank or name not in PLACE) and name not in os.environ:
            os.environ[name] = _from_dotenv[name] = value


def rendezvous_in_environment() -> str | None:
    """HOST:PORT of MASTER_ADDR and MASTER_PORT; None in a rank, whose address is set by its launcher."""
    parts = [os.environ.get(name) for name in ADDRESS]
    return ":".join(map(str, parts)) if all(parts) and "RANK" not in os.environ else None


@cache
def report_unused(folder: Path) -> None:
    """Print the variables of a `.env` file that a run on one host does not use; once per process and folder."""
    names = [name for name in _dotenv(folder) if name in (*ADDRESS, *PLACE)]
    if names:
        print(
            f"{folder / '.env'}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not used; a run on one host "
            "needs no network address, and procs is the number of its processes",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def report_shared_cores(ranks: int, cores: int) -> None:
    """Print what it costs to have more ranks on this machine than cores, if it has."""
    if ranks > cores:
        there = "1 core" if cores == 1 else f"{cores} cores"
        print(
            f"{ranks} processes share {there}: they are not faster than procs={cores}, and each needs memory for its "
            "own copy of the model",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _dotenv(folder: Path) -> dict[str, str]:
    """The variables in a `.env` file that have a value; empty if there is no such file."""
    path = folder / ".env"
    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); write NAME=VALUE lines in UTF-8, or remove it") from None


def pick_launcher(name: str, *, has_rendezvous: bool = False) -> str:
    """The launcher that the config names; `auto` is `torchrun` or `slurm` if it started this process, else `local`."""
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if name == "torchrun" and not is_rank:
        raise ConfigError("launcher=torchrun but RANK and WORLD_SIZE are not set; start it with torchrun …")
    if name == "slurm" and not is_step(os.environ):
        raise ConfigError("launcher=slurm but this is not one of several tasks of srun; start it with srun …")
    if name != "auto":
        return name
    if is_rank:
        return "torchrun"
    # With a rendezvous, a task is a host that starts its ranks itself.
    return "slurm" if is_step(os.environ) and not has_rendezvous else "local"


def join_step() -> None:
    """Set the variables of a rank for this task of `srun`."""
    world = world_of(os.environ)
    os.environ.update(world | variables_towards(world["MASTER_ADDR"]))


def shares_cores(ddp: Any, procs: Any) -> bool:
    """Whether these config keys request several local ranks, which share the cores of this machine."""
    return bool(ddp) and str(procs) not in ("None", "1")


def ranks_here() -> int:
    """The number of ranks on this machine, under torchrun or Slurm."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def is_restarted() -> bool:
    """Whether torchrun has started this rank again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def is_main_process() -> bool:
    """Whether this process prints for the run: the launcher, or rank 0 under torchrun or Slurm."""
    return os.environ.get("RANK", "0") == "0"
