"""The hosts of one run: the coordinator waits for them, and assigns ranks to each of them.

All hosts run the same command. The host that owns the rendezvous address becomes the coordinator; it opens the run
folder and makes all decisions, as on a single machine. The others are its agents (`agent.py`). All hosts see
one shared folder, and an agent needs the key in it (`key.py`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.formatting import printable
from paceline.launch import kubernetes, network, processes
from paceline.launch.cluster.members import Members
from paceline.launch.cluster.messages import Over
from paceline.launch.cluster.ranks import ClusterRanks
from paceline.launch.machines import Rendezvous, capacity, fitting, serve_store, variables_of
from paceline.world import COLLECTIVE_TIMEOUT

GATHER_S = 900.0  # for the minimum number of hosts to join
LAST_CALL_S = 3.0  # after the last host of `nodes: 1:4` that joined
LOG_S = 10.0  # between lines about hosts that are still missing


class Coordinator:
    """The machines of a run on several hosts; this host is the first."""

    def __init__(self, config: Config, listening: socket.socket, key: bytes, log: Callable[[str], None]) -> None:
        assert config.nodes_range is not None
        self.config, self.log = config, log
        self.host = str(listening.getsockname()[0])
        self.least, self.most = config.nodes_range
        self.capacity = capacity(config)[1]
        self._variables = network.variables_towards(self.host)
        self._members = Members(config, listening, key, log)
        self._local_size = 0
        self._attempt = 0

    def gather(self, has_request: Callable[[], bool] = bool) -> None:
        """Wait for the minimum number of hosts, and a moment longer for others, or until there is a request to stop."""
        began = logged_at = time.monotonic()
        while not has_request():
            for _ in self._members.reports(0.1):  # also removes hosts that have left
                pass
            self._members.take_new()
            now, names = time.monotonic(), self._members.names
            is_enough = len(names) >= self.least
            if len(names) >= self.most or (is_enough and now - self._members.joined_at >= LAST_CALL_S):
                return
            listed = ", ".join(names)
            if now - began > GATHER_S:
                raise kubernetes.retried(
                    ConfigError(f"nodes={self.config.nodes} but only {listed} joined within {GATHER_S:.0f} s")
                )
            if not is_enough and (logged_at == began or now - logged_at > LOG_S):
                logged_at = now
                self.log(f"waiting for hosts at {self.config.rendezvous}: {len(names)} of {self.least} ({listed})")

    # --- capacity --------------------------------------------------------------------------------------------------

    def ranks_for(self, lanes: int | None) -> int:
        """The largest number of ranks that fit on all hosts."""
        return fitting(1, sum(self._capacities()), lanes)

    def _capacities(self) -> list[int]:
        """The capacity of this host and of each agent; agents beyond the maximum number of hosts get no ranks."""
        agents = enumerate(self._members.agents, start=1)
        return [self.capacity, *(agent.capacity if n < self.most else 0 for n, agent in agents)]

    def lanes_for(self, ranks: int) -> int:
        """The largest possible number of ranks after all hosts have joined."""
        return max(ranks, self.most * self.capacity if self.least < self.most else 0)

    def ranks_per_machine(self, ranks: int) -> int:
        """The ranks per host after all hosts have joined."""
        return -(-ranks // self.most)

    def has_capacity_beyond(self, ranks: int, lanes: int | None) -> bool:
        """Whether more ranks are possible because a host has joined."""
        return self.ranks_for(lanes) > ranks

    # --- one attempt -----------------------------------------------------------------------------------------------

    @contextmanager
    def rendezvous(self, ranks: int) -> Iterator[Rendezvous]:
        """Assign the ranks to hosts; ranks find each other through a store in this process, at a free port."""
        counts = distributed(ranks, self._capacities())
        self._local_size = taken = counts[0]
        for agent, count in zip(self._members.agents, counts[1:], strict=True):
            agent.first, agent.ranks, taken = taken, count, taken + count
        listed = ", ".join(f"{n} on {name}" for name, n in zip(self._members.names, counts, strict=True))
        self.log(
            f"ranks: {listed}; a hang is reported after {self.config.hang_timeout_s:.0f} s; Gloo and NCCL would wait "
            f"for {COLLECTIVE_TIMEOUT.days} days"
        )
        store, common = serve_store(self.host)
        places = [(local_rank, count) for count in counts for local_rank in range(count)]
        yield Rendezvous([{**variables_of(rank, ranks, *place), **common} for rank, place in enumerate(places)])
        del store

    @contextmanager
    def rank_group(self) -> Iterator[ClusterRanks]:
        """The ranks of all hosts."""
        self._attempt += 1
        with processes.ranks(is_passive=True) as local:
            yield ClusterRanks(self._members, local, self._local_size, self._variables, self._attempt)

    def finish(self, run_dir: Path | None, error: str = "", exit_code: int = 1) -> None:
        """Send the outcome of the run to the agents, and stop listening."""
        folder = str(run_dir) if run_dir is not None else None
        self._members.dismiss(Over(run_dir=folder, error=printable(error), exit_code=exit_code))


def distributed(ranks: int, capacities: Sequence[int]) -> list[int]:
    """The number of ranks of each host, as equal as the capacities allow (pure)."""
    counts = [0] * len(capacities)
    for _ in range(ranks):
        free = [host for host, count in enumerate(counts) if count < capacities[host]]
        counts[min(free, key=lambda host: counts[host])] += 1
    return counts
