"""Where ranks live: on this machine alone, or on several hosts of which it is the first (`launch/hosts.py`)."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.config import Config
from paceline.launch import network
from paceline.launch import processes as processes
from paceline.launch.environment import shares_cores
from paceline.launch.fork_server import RankSpec
from paceline.system.cores import usable_cores


class RankGroup(Protocol):
    """The ranks of one life, wherever they are."""

    pids: dict[int, int]  # of the living
    codes: dict[int, int]  # of those that have ended: 0, an exit code, or minus the signal

    def start(self, births: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on."""

    def look(self, seconds: float) -> None:
        """Take in what has happened to the ranks; wait for news for so long."""

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that do not follow in time."""


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of one life find each other."""

    variables: list[dict[str, str]]  # of each rank
    store: str = ""  # a file that all of them see; without it, they meet at MASTER_ADDR
    spare: Path | None = None  # a folder for their failures, should the run folder's disk be full


class Machines(Protocol):
    """A place for ranks."""

    def gather(self, is_asked: Callable[[], bool] = bool) -> None:
        """Wait until there is room enough for a life to begin, or somebody asks to stop."""

    def ranks_for(self, lanes: int | None) -> int:
        """As many ranks as the config allows and there is room for, and as the lanes can be shared among."""

    def lanes_for(self, ranks: int) -> int:
        """The lanes of a run that begins with so many ranks."""

    def shares_of(self, ranks: int) -> int:
        """How many of so many ranks share one machine."""

    def meeting(self, ranks: int) -> AbstractContextManager[Rendezvous]:
        """A place to meet for so many ranks."""

    def ranks(self) -> AbstractContextManager[RankGroup]:
        """Those who will be born, and nobody else meanwhile."""

    def is_outgrown(self, ranks: int, lanes: int | None) -> bool:
        """Whether a life of so many ranks could have more by now."""


class LocalMachine:
    """This machine alone. Its ranks meet in a file of a private folder, and Gloo and NCCL listen on loopback."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def gather(self, is_asked: Callable[[], bool] = bool) -> None:
        """Nobody else comes."""

    def ranks_for(self, lanes: int | None) -> int:
        """As many as the machine has room for."""
        least, most = capacity(self.config)
        return fitting(least, most, lanes)

    def lanes_for(self, ranks: int) -> int:
        """One for each."""
        return ranks

    def shares_of(self, ranks: int) -> int:
        """All of them."""
        return ranks

    @contextmanager
    def meeting(self, ranks: int) -> Iterator[Rendezvous]:
        """In a file."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as private:
            variables = [variables_of(rank, ranks, rank, ranks) for rank in range(ranks)]
            yield Rendezvous(variables, store=f"{private}/store", spare=Path(private))

    def ranks(self) -> AbstractContextManager[RankGroup]:
        """Children of this machine's nursery."""
        return processes.ranks(is_passive=shares_cores(self.config.ddp, self.config.procs))

    def is_outgrown(self, ranks: int, lanes: int | None) -> bool:
        """Never."""
        return False


def variables_of(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What a rank is told of its place in the world."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(number) for name, number in numbers.items()}


def serve_store(host: str) -> tuple[dist.Store, dict[str, str]]:
    """A store of this process at a port that the system chooses, and what ranks must be told to meet there."""
    listening = socket.create_server((network.resolve(host), 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # what torch calls a store that no rank has to serve
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def capacity(config: Config) -> tuple[int, int]:
    """The least and the most ranks that this machine shall have."""
    return room_among(config, torch.cuda.device_count() if config.device != "cpu" else 0, usable_cores())


def room_among(config: Config, gpus: int, cores: int) -> tuple[int, int]:
    """The least and the most ranks where there are so many GPUs and cores for them (pure)."""
    if not config.ddp:
        return 1, 1
    if config.procs_range is None:
        return 1, gpus or 1
    least, most = config.procs_range
    return least, max(least, min(most, gpus or cores)) if least < most else most


def fitting(least: int, most: int, lanes: int | None) -> int:
    """The largest of these numbers that the lanes can be shared among; the largest of all if none can (pure)."""
    return max((number for number in range(least, most + 1) if (lanes or number) % number == 0), default=most)
