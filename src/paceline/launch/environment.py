"""The environment: how this process was started, its cores, and a `.env` file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from paceline.errors import ConfigError
from paceline.launch.network import variables_towards
from paceline.launch.slurm import is_step, world_of


def load_dotenv(folder: Path) -> None:
    """Set variables from a `.env` file beside the config, such as MASTER_ADDR; those that are set already stay."""
    path = folder / ".env"
    try:
        values = dotenv_values(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); write NAME=VALUE lines in UTF-8, or remove it") from None
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, value)


def pick_launcher(name: str, *, has_rendezvous: bool = False) -> str:
    """The launcher that the config names; for `auto`, `torchrun` or `slurm` in a world of theirs, or `local`."""
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
    """Set the variables of a world for this task of `srun`."""
    world = world_of(os.environ)
    os.environ.update(world | variables_towards(world["MASTER_ADDR"]))


def shares_cores(ddp: Any, procs: Any) -> bool:
    """Whether these config keys ask for several local ranks, which share the cores of this machine."""
    return bool(ddp) and str(procs) not in ("None", "1")


def ranks_here() -> int:
    """The number of ranks on this machine, in a world of torchrun or Slurm."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def is_restarted() -> bool:
    """Whether torchrun has started this rank again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def is_main_process() -> bool:
    """Whether this process prints for the run: the launcher, or rank 0 in a world of torchrun or Slurm."""
    return os.environ.get("RANK", "0") == "0"
