"""The ranks of one attempt on several hosts, started and watched from the coordinator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from signal import Signals

from paceline.launch.cluster.members import Members
from paceline.launch.cluster.messages import End, Signal, Start
from paceline.launch.fork_server import RankSpec
from paceline.launch.processes import LocalRanks
from paceline.observe.failures import HOST_LOST


@dataclass
class ClusterRanks:
    """The ranks of all hosts, numbered from those of the coordinator."""

    members: Members
    local: LocalRanks
    local_size: int
    local_variables: dict[str, str]
    attempt: int  # reports about another attempt are late, and ignored
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on, each on its host."""
        self.pids, self.codes = dict.fromkeys(range(len(specs)), 0), {}
        self.local.start(
            [spec._replace(variables={**spec.variables, **self.local_variables}) for spec in specs[: self.local_size]]
        )
        for agent in self.members.agents:
            theirs = list(specs[agent.first : agent.first + agent.ranks])
            agent.send(Start(attempt=self.attempt, ranks=theirs))

    def poll(self, timeout_s: float) -> None:
        """Update `pids` and `codes` from all hosts; wait up to `timeout_s` for a change."""
        for agent, state in self.members.reports(timeout_s, self.local.channel.fileno()):
            if state is None:
                lost = [rank for rank in self.pids if agent.owns(rank)]
                self._note(0, {}, dict.fromkeys(lost, HOST_LOST))
            elif state.attempt == self.attempt:
                self._note(agent.first, state.pids, state.codes)
        self.local.poll(0)
        self._note(0, self.local.pids, self.local.codes)
        self.members.take_new()

    def _note(self, first: int, pids: dict[int, int], codes: dict[int, int]) -> None:
        """Store the state of a host's ranks, which that host counts from 0."""
        for rank, pid in pids.items():
            if first + rank in self.pids:
                self.pids[first + rank] = pid
        for rank, code in codes.items():
            if self.pids.pop(first + rank, None) is not None:
                self.codes[first + rank] = code

    def signal(self, number: int) -> None:
        """Send a signal to the ranks of all hosts."""
        self.local.signal(number)
        for agent in self.members.agents:
            agent.send(Signal(number=number))

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that still run; remove a host that does not respond."""
        for agent in self.members.agents:
            agent.send(End(number=Signals(number), grace_s=grace_s))
        self.local.end(number, grace_s)
        deadline = time.monotonic() + 3 * grace_s
        while self.pids and time.monotonic() < deadline:
            self.poll(0.1)
        for agent in [agent for agent in self.members.agents if any(map(agent.owns, self.pids))]:
            self.members.remove(agent, "does not respond, and is removed from the run")
