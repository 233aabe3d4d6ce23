"""Several hosts as one site: the head gathers them, says which ranks they start, and hears how those end.

Every host runs the same command. The one that owns the rendezvous address becomes the head; it opens the run folder
and takes all decisions, just as on a single machine. The others are its guests (`launch/guest.py`). All of them see one
shared folder, and the key in it (`launch/key.py`) is what a guest must know.
"""

from __future__ import annotations

import platform
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from signal import Signals

import torch

from paceline.checkpoint.resume import identity_of
from paceline.config import Config
from paceline.errors import ConfigError
from paceline.formatting import printable
from paceline.launch import network
from paceline.launch import processes as processes
from paceline.launch.cluster.messages import HELLO, RANKS_STATE, End, Message, Over, Refused, Signal, Start, Welcome
from paceline.launch.cluster.transport import BadMessage, Connection, Listener
from paceline.launch.fork_server import RankSpec
from paceline.launch.machines import Rendezvous, capacity, fitting, serve_store, variables_of
from paceline.observe.failures import HOST_LOST
from paceline.world import PATIENCE

PATIENCE_S = 900.0  # for hosts to come
LAST_CALL_S = 3.0  # after the last one of `nodes: 1:4` that came
TELL_S = 10.0  # between words about who is still missing


@dataclass
class Guest:
    """Another host, as the head sees it."""

    name: str
    room: int
    connection: Connection
    has_our_config: bool = True
    first: int = 0  # the number of its first rank
    ranks: int = 0

    def send(self, message: Message) -> None:
        """Send a message; the next look finds out whether the host has left."""
        with suppress(OSError):
            self.connection.send(message)


@dataclass
class Hosts:
    """The site of a run on several hosts, and its ranks: those of the head come first."""

    config: Config
    door: socket.socket
    key: bytes
    say: Callable[[str], None]
    guests: list[Guest] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.config.nodes_range is not None
        assert self.config.rendezvous is not None
        self.host = address_in(self.config.rendezvous)[0]
        self.least, self.most = self.config.nodes_range
        self.room = capacity(self.config)[1]
        self._variables = network.variables_towards(self.host)
        self._arrived: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self._own: processes.LocalRanks | None = None
        self._own_ranks = 0
        self._attempt = 0
        self._last_came = time.monotonic()
        self._listener = Listener(self.door, self.key, self._admit, self.say)

    # --- who is here -----------------------------------------------------------------------------------------------

    def gather(self, is_asked: Callable[[], bool] = bool) -> None:
        """Wait for the least number of hosts, and a moment longer for others; not when asked to stop."""
        began = told = time.monotonic()
        while not is_asked():
            self.look(0.1)
            now, here = time.monotonic(), len(self.guests) + 1
            if here >= self.most or (here >= self.least and now - self._last_came >= LAST_CALL_S):
                return
            names = ", ".join([socket.gethostname(), *(guest.name for guest in self.guests)])
            if now - began > PATIENCE_S:
                raise ConfigError(f"nodes={self.config.nodes} but after {PATIENCE_S:.0f} s only {names} came")
            if here < self.least and (told == began or now - told > TELL_S):
                told = now
                self.say(f"waiting for hosts at {self.config.rendezvous}: {here} of {self.least} ({names})")

    def _admit(self, connection: Connection) -> None:
        """Take a host that knows the key, if its versions are the same. Called in a thread of that connection."""
        try:
            hello = connection.receive(HELLO)
            if hello.versions == versions():
                connection.send(Welcome(name=socket.gethostname()))
                has_our_config = hello.config == fingerprint(self.config)
                self._arrived.put(Guest(hello.name, hello.room, connection, has_our_config))
                return
            connection.send(Refused(reason=f"{hello.name} has {hello.versions}, the head {versions()}"))
        except (OSError, EOFError):
            pass
        connection.close()

    # --- room ------------------------------------------------------------------------------------------------------

    def ranks_for(self, lanes: int | None) -> int:
        """As many as all hosts have room for."""
        return fitting(1, sum(self._rooms()), lanes)

    def _rooms(self) -> list[int]:
        """The room of this host and of each guest; those who are too many stand by."""
        return [self.room, *(guest.room if n < self.most else 0 for n, guest in enumerate(self.guests, start=1))]

    def lanes_for(self, ranks: int) -> int:
        """As many as there may be ranks once all hosts have come."""
        return max(ranks, self.most * self.room if self.least < self.most else 0)

    def shares_of(self, ranks: int) -> int:
        """Those of one host, when all have come."""
        return -(-ranks // self.most)

    def is_outgrown(self, ranks: int, lanes: int | None) -> bool:
        """Whether somebody has come who makes them more."""
        return self.ranks_for(lanes) > ranks

    # --- one life --------------------------------------------------------------------------------------------------

    @contextmanager
    def meeting(self, ranks: int) -> Iterator[Rendezvous]:
        """In a store of this process, at a port that the system chooses."""
        seats = seated(ranks, self._rooms())
        self._own_ranks, taken = seats[0], seats[0]
        for guest, number in zip(self.guests, seats[1:], strict=True):
            guest.first, guest.ranks, taken = taken, number, taken + number
        counts = zip([socket.gethostname(), *(guest.name for guest in self.guests)], seats, strict=True)
        self.say(
            f"ranks: {', '.join(f'{number} on {name}' for name, number in counts)}; a hang is told after "
            f"{self.config.hang_timeout_s:.0f} s, Gloo and NCCL would wait for {PATIENCE.days} days"
        )
        store, common = serve_store(self.host)
        places = [(local, number) for number in seats for local in range(number)]
        yield Rendezvous([{**variables_of(rank, ranks, *place), **common} for rank, place in enumerate(places)])
        del store

    @contextmanager
    def ranks(self) -> Iterator[Hosts]:
        """On all hosts."""
        with processes.ranks(is_passive=True) as self._own:
            yield self
        self._own = None

    def start(self, births: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on, each on its host."""
        assert self._own is not None
        self._attempt += 1
        self.pids, self.codes = dict.fromkeys(range(len(births)), 0), {}
        own = [birth._replace(variables={**birth.variables, **self._variables}) for birth in births[: self._own_ranks]]
        self._own.start(own)
        for guest in self.guests:
            own = list(births[guest.first : guest.first + guest.ranks])
            guest.send(Start(attempt=self._attempt, ranks=own))

    def look(self, seconds: float) -> None:
        """Take in what has happened on all hosts; wait for news for so long."""
        own = [self._own.channel.fileno()] if self._own is not None else []
        ready = wait([*own, *(guest.connection.fileno() for guest in self.guests)], seconds)
        for guest in [guest for guest in self.guests if guest.connection.fileno() in ready]:
            self._hear(guest)
        if self._own is not None:
            self._own.look(0)
            self._note(0, self._own.pids, self._own.codes)
        while not self._arrived.empty():
            guest = self._arrived.get()
            self.guests.append(guest)
            self._last_came = time.monotonic()
            other = "" if guest.has_our_config else "; its config is another one, that of the head counts"
            self.say(f"host {guest.name} has come, with room for {guest.room}{other}")

    def _hear(self, guest: Guest) -> None:
        try:
            while guest.connection.poll(0):
                state = guest.connection.receive(RANKS_STATE)
                if state.attempt == self._attempt:  # and no late report of an earlier one
                    self._note(guest.first, state.pids, state.codes)
        except (EOFError, OSError) as error:
            guest.connection.close()
            self.guests.remove(guest)
            self.say(f"host {guest.name} is gone{f': {error}' if isinstance(error, BadMessage) else ''}")
            lost = [rank for rank in range(guest.first, guest.first + guest.ranks) if rank in self.pids]
            self._note(0, {}, dict.fromkeys(lost, HOST_LOST))

    def _note(self, first: int, pids: dict[int, int], codes: dict[int, int]) -> None:
        """What a host knows of its ranks, which it counts from 0."""
        for rank, pid in pids.items():
            if first + rank in self.pids:
                self.pids[first + rank] = pid
        for rank, code in codes.items():
            if self.pids.pop(first + rank, None) is not None:
                self.codes[first + rank] = code

    def signal(self, number: int) -> None:
        """Send a signal to the ranks, on all hosts."""
        if self._own is not None:
            self._own.signal(number)
        for guest in self.guests:
            guest.send(Signal(number=number))

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that do not follow; a host that does not answer is left."""
        for guest in self.guests:
            guest.send(End(number=Signals(number), grace_s=grace_s))
        if self._own is not None:
            self._own.end(number, grace_s)
        deadline = time.monotonic() + 3 * grace_s
        while self.pids and time.monotonic() < deadline:
            self.look(0.1)
        for guest in list(self.guests):
            if any(rank in self.pids for rank in range(guest.first, guest.first + guest.ranks)):
                guest.connection.close()
                self.guests.remove(guest)
                self.say(f"host {guest.name} does not answer, and is left")

    def part(self, run_dir: Path | None, error: str = "", code: int = 1) -> None:
        """Send the guests how the run ended, and give the address back."""
        self._listener.close()
        over = Over(run_dir=str(run_dir) if run_dir is not None else None, error=printable(error), exit_code=code)
        while not self._arrived.empty():
            self.guests.append(self._arrived.get())
        for guest in self.guests:
            guest.send(over)
            guest.connection.close()


def seated(ranks: int, rooms: Sequence[int]) -> list[int]:
    """How many ranks each host gets: as equally many as their rooms allow (pure)."""
    seats = [0] * len(rooms)
    for _ in range(ranks):
        free = [host for host, taken in enumerate(seats) if taken < rooms[host]]
        seats[min(free, key=lambda host: seats[host])] += 1
    return seats


def address_in(rendezvous: str) -> tuple[str, int]:
    """The host and the port of `host:port`."""
    host, _, port = rendezvous.rpartition(":")
    return host, int(port)


def versions() -> dict[str, str]:
    """What must be equal on all hosts for equal bits, and for a common language."""
    return {"paceline": version("paceline"), "torch": torch.__version__, "python": platform.python_version()}


def fingerprint(config: Config) -> str:
    """What tells whether two hosts mean the same run."""
    identity = identity_of(config, lanes=0, samples=None, device=torch.device("cpu"))
    return str(identity["config_sha256"])
