"""The coordinator's list of the hosts that have joined a run: admits agents, and receives their reports."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from paceline.config import Config
from paceline.formatting import ranks_text
from paceline.launch.cluster.identity import fingerprint, versions
from paceline.launch.cluster.listener import Listener
from paceline.launch.cluster.messages import HELLO, RANKS_STATE, Message, Over, RanksState, Refused, Welcome
from paceline.launch.cluster.transport import BadMessage, Connection


@dataclass(eq=False)
class Agent:
    """The agent of another host."""

    name: str
    capacity: int
    connection: Connection
    has_our_config: bool = True
    first: int = 0  # its first rank in the current attempt
    ranks: int = 0

    def send(self, message: Message) -> None:
        """Send a message; if the host has left, its next report is None."""
        with suppress(OSError):
            self.connection.send(message)

    def owns(self, rank: int) -> bool:
        """Whether a rank of the current attempt runs on this host."""
        return self.first <= rank < self.first + self.ranks


class Members:
    """The agents of a run, in the order in which they joined."""

    def __init__(self, config: Config, listening: socket.socket, key: bytes, log: Callable[[str], None]) -> None:
        self.agents: list[Agent] = []
        self.joined_at = time.monotonic()  # the time when the last agent joined
        self._config, self._log = config, log
        self._joining: queue.SimpleQueue[Agent] = queue.SimpleQueue()
        self._listener = Listener(listening, key, self._admit, log)

    @property
    def names(self) -> list[str]:
        """The names of all hosts, this one first."""
        return [socket.gethostname(), *(agent.name for agent in self.agents)]

    def _admit(self, connection: Connection) -> None:
        """Admit an authenticated host if its versions are equal. Called in the thread of the connection."""
        try:
            hello = connection.receive(HELLO)
            if hello.versions == versions():
                connection.send(Welcome(name=socket.gethostname()))
                has_our_config = hello.config == fingerprint(self._config)
                self._joining.put(Agent(hello.name, hello.capacity, connection, has_our_config))
                return
            connection.send(Refused(reason=f"{hello.name} has {hello.versions}, the coordinator {versions()}"))
        except (OSError, EOFError):
            pass
        connection.close()

    def take_new(self) -> None:
        """Add the agents that have been admitted since the last call."""
        while not self._joining.empty():
            agent = self._joining.get()
            self.agents.append(agent)
            self.joined_at = time.monotonic()
            other = "" if agent.has_our_config else "; its config differs, so the coordinator's is used"
            self._log(f"host {agent.name} has joined, with capacity for {ranks_text(agent.capacity)}{other}")

    def reports(self, timeout_s: float, channel: int | None = None) -> Iterator[tuple[Agent, RanksState | None]]:
        """The agents' reports about their ranks; None for an agent that has left, which is removed.

        Waits up to `timeout_s` for the first report, or until the file `channel` can be read.
        """
        files = [agent.connection.fileno() for agent in self.agents]
        ready = wait([*files, *([] if channel is None else [channel])], timeout_s)
        for agent in [agent for agent in self.agents if agent.connection.fileno() in ready]:
            try:
                while agent.connection.poll(0):
                    yield agent, agent.connection.receive(RANKS_STATE)
            except (EOFError, OSError) as error:
                self.remove(agent, f"has left{f': {error}' if isinstance(error, BadMessage) else ''}")
                yield agent, None

    def remove(self, agent: Agent, why: str) -> None:
        """Close the connection to an agent, and log why."""
        agent.connection.close()
        self.agents.remove(agent)
        self._log(f"host {agent.name} {why}")

    def dismiss(self, over: Over) -> None:
        """Send the outcome of the run to all agents, and stop listening."""
        self._listener.close()
        while not self._joining.empty():
            self.agents.append(self._joining.get())
        for agent in self.agents:
            agent.send(over)
            agent.connection.close()
