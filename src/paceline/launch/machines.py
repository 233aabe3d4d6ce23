"""The machines that run ranks: this machine only, or several hosts (`launch/cluster/coordinator.py`)."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.config import Config
from paceline.launch import network, processes
from paceline.launch.environment import shares_cores
from paceline.launch.fork_server import RankSpec
from paceline.system.cores import usable_cores

RESEND_S = 1.0


class RankGroup(Protocol):
    """The ranks of one attempt, on one machine or several."""

    pids: dict[int, int]  # of running ranks
    codes: dict[int, int]  # of ranks that have ended: 0, an exit code, or minus the signal

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on."""

    def poll(self, timeout_s: float) -> None:
        """Update `pids` and `codes`; wait up to `timeout_s` for a change."""

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that still run after `grace_s`."""


class StopSender:
    """Sends a request to stop to ranks, repeated every second, because a rank that is still starting ignores it."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._sent_at = group, 0.0

    def send(self, number: int) -> bool:
        """Send a signal, unless it is 0 or was sent less than a second ago; whether this was the first time."""
        if not number or time.monotonic() - self._sent_at <= RESEND_S:
            return False
        is_first, self._sent_at = not self._sent_at, time.monotonic()
        self._group.signal(number)
        return is_first


@dataclass(frozen=True)
class Rendezvous:
    """The way in which the ranks of one attempt find each other."""

    variables: list[dict[str, str]]  # of each rank
    store: str = ""  # a file that all ranks can read; without it, they connect to MASTER_ADDR
    spare: Path | None = None  # a folder for their failures, in case the run folder's disk is full


class Machines(Protocol):
    """The machines of a run: the number of ranks that fit, their rendezvous, and the processes that start them."""

    def gather(self, has_request: Callable[[], bool] = bool) -> None:
        """Wait until there is capacity for an attempt, or there is a request to stop."""

    def ranks_for(self, lanes: int | None) -> int:
        """The largest number of ranks that the config allows, that fits, and for which there are lanes."""

    def lanes_for(self, ranks: int) -> int:
        """The lanes of a new run that starts with this number of ranks."""

    def ranks_per_machine(self, ranks: int) -> int:
        """The number of ranks per machine, for this number of ranks."""

    def rendezvous(self, ranks: int) -> AbstractContextManager[Rendezvous]:
        """A context with a rendezvous for this number of ranks."""

    def rank_group(self) -> AbstractContextManager[RankGroup]:
        """A context with the rank group of one attempt, which no other run uses at the same time."""

    def has_capacity_beyond(self, ranks: int, lanes: int | None) -> bool:
        """Whether an attempt could now have more than this number of ranks."""


class LocalMachine:
    """This machine only. Its ranks find each other through a private file, and Gloo and NCCL listen on loopback."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def gather(self, has_request: Callable[[], bool] = bool) -> None:
        """Return immediately: there are no other hosts."""

    def ranks_for(self, lanes: int | None) -> int:
        """The largest number of ranks that fit on this machine."""
        least, most = capacity(self.config)
        return fitting(least, most, lanes)

    def lanes_for(self, ranks: int) -> int:
        """The number of lanes: one per rank."""
        return ranks

    def ranks_per_machine(self, ranks: int) -> int:
        """The number of ranks per machine: all of them."""
        return ranks

    @contextmanager
    def rendezvous(self, ranks: int) -> Iterator[Rendezvous]:
        """A rendezvous through a file in a private folder."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as private:
            variables = [variables_of(rank, ranks, rank, ranks) for rank in range(ranks)]
            yield Rendezvous(variables, store=f"{private}/store", spare=Path(private))

    def rank_group(self) -> AbstractContextManager[RankGroup]:
        """Processes that are forked from this machine's fork server."""
        return processes.ranks(is_passive=shares_cores(self.config.ddp, self.config.procs))

    def has_capacity_beyond(self, ranks: int, lanes: int | None) -> bool:
        """False: the capacity of this machine does not change."""
        return False


def variables_of(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """The environment variables that define a rank's position in the world."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(number) for name, number in numbers.items()}


def serve_store(host: str) -> tuple[dist.Store, dict[str, str]]:
    """A store in this process at a free port, and the environment variables with its address."""
    listening = socket.create_server((network.resolve(host), 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's variable for a store that no rank has to serve
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def capacity(config: Config) -> tuple[int, int]:
    """The smallest and the largest number of ranks for this machine."""
    return capacity_among(config, torch.cuda.device_count() if config.device != "cpu" else 0, usable_cores())


def capacity_among(config: Config, gpus: int, cores: int) -> tuple[int, int]:
    """The smallest and the largest number of ranks for these numbers of GPUs and cores (pure)."""
    if not config.ddp:
        return 1, 1
    if config.procs_range is None:
        return 1, gpus or 1
    least, most = config.procs_range
    return least, max(least, min(most, gpus or cores)) if least < most else most


def fitting(least: int, most: int, lanes: int | None) -> int:
    """The largest number in this range that has a lane for each rank; the least if there are too few lanes (pure)."""
    return most if lanes is None else max(least, min(most, lanes))
