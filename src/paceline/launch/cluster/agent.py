"""A host that offers room for ranks to the head of a run, and starts and ends them as it is told."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, RankFailed, Stopped
from paceline.launch import network
from paceline.launch import processes as processes
from paceline.launch.cluster.coordinator import PATIENCE_S, TELL_S, address_in, fingerprint, versions
from paceline.launch.cluster.key import key_of
from paceline.launch.cluster.messages import (
    ANSWER,
    ORDER,
    End,
    Hello,
    Over,
    RanksState,
    Refused,
    Signal,
    Start,
    Welcome,
)
from paceline.launch.cluster.transport import BadMessage, Connection, HandshakeFailed, KeysDiffer, connect
from paceline.launch.fork_server import LOOK_S
from paceline.launch.machines import capacity
from paceline.launch.processes import LocalRanks
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome, collect
from paceline.system.signals import SIGNALS, handled, heeded

RETURN_S = 60.0  # for a head that was there and does not answer
RETRY_S = 0.5
VISIBLE_S = 60.0  # for NFS to show what another host has written
STRANGERS = 3  # greetings that failed one after the other
RESEND_S = 1.0  # a rank that is still starting ignores a request to stop
GRACE_S = 5.0

Say = Callable[[str], None]


def serve(config: Config, say: Say) -> Outcome:
    """Take part in a run until its head says that it is over; the outcome that it has there."""
    assert config.rendezvous is not None
    patience_s = PATIENCE_S
    with processes.ranks(is_passive=True) as ranks, _hearing(ranks) as asked:
        while True:
            connection = _joined(config, config.rendezvous, patience_s, say)
            try:
                variables = network.variables_towards(address_in(config.rendezvous)[0])
                over = _follow(connection, ranks, variables, asked, say)
            except (EOFError, OSError) as error:
                patience_s = RETURN_S
                why = f" ({error})" if isinstance(error, BadMessage) else ""
                say(f"the head at {config.rendezvous} does not answer any more{why}; trying to reach it again")
            else:
                return _outcome_of(over)
            finally:
                ranks.end(signal.SIGKILL, GRACE_S)
                connection.close()


def _joined(config: Config, rendezvous: str, patience_s: float, say: Say) -> Connection:
    """A connection to the head, which knows this host now."""
    host, port = address_in(rendezvous)
    began = told = time.monotonic()
    strangers = 0
    while True:
        try:
            connection = connect(host, port, key_of(config))
            answer = _ask(connection, config)
        except KeysDiffer:
            raise ConfigError(
                f"rendezvous={rendezvous} does not know the key that lies in the run's folder here; all hosts must see "
                "one shared folder, and start in the same place of it"
            ) from None
        except (EOFError, OSError) as error:
            now, strangers = time.monotonic(), strangers + 1 if isinstance(error, HandshakeFailed) else 0
            if strangers >= STRANGERS:
                raise ConfigError(f"rendezvous={rendezvous} is used by another program; choose another port") from None
            if now - began > patience_s:
                raise RankFailed(
                    f"no head could be reached at {rendezvous} for {patience_s:.0f} s ({error}); the run may have ended"
                ) from None
            if told == began or now - told > TELL_S:
                told = now
                say(f"waiting for the head at {rendezvous}")
            time.sleep(RETRY_S)
            continue
        if isinstance(answer, Refused):
            connection.close()
            raise ConfigError(f"rendezvous={rendezvous} takes only hosts of its own versions: {answer.reason}")
        say(f"joined {answer.name} at {rendezvous}")
        return connection


def _ask(connection: Connection, config: Config) -> Welcome | Refused:
    """Introduce this host to the head; its answer."""
    try:
        hello = Hello(
            name=socket.gethostname(), room=capacity(config)[1], versions=versions(), config=fingerprint(config)
        )
        connection.send(hello)
        return connection.receive(ANSWER)
    except BaseException:
        connection.close()
        raise


def _follow(connection: Connection, ranks: LocalRanks, variables: dict[str, str], asked: list[int], say: Say) -> Over:
    """Do as the head says until the run is over; report the ranks' state to it; pass signals on to the ranks."""
    told: tuple[dict[int, int], dict[int, int]] = ({}, {})
    attempt, passed_on = 0, 0.0
    while True:
        while connection.poll(0 if ranks.pids else LOOK_S):
            order = connection.receive(ORDER)
            match order:
                case Start():
                    attempt = order.attempt
                    ranks.start([birth._replace(variables={**birth.variables, **variables}) for birth in order.ranks])
                case Signal():
                    ranks.signal(order.number)
                case End():
                    ranks.end(order.number, order.grace_s)
                case Over():
                    return order
        if asked and time.monotonic() - passed_on > RESEND_S:
            if not passed_on:
                say(f"{signal.Signals(asked[0]).name}: asking all ranks to save and stop; again, this host leaves")
            passed_on = time.monotonic()
            ranks.signal(asked[0])
        ranks.look(LOOK_S)
        if told != (ranks.pids, ranks.codes):
            told = (dict(ranks.pids), dict(ranks.codes))
            connection.send(RanksState(attempt=attempt, pids=told[0], codes=told[1]))


def _outcome_of(over: Over) -> Outcome:
    """What the run left in the shared folder, which a network file system may show a little later; or its error."""
    if over.run_dir is None:
        error = ConfigError(over.error) if over.exit_code == ConfigError.exit_code else RankFailed(over.error)
        error.exit_code = over.exit_code
        raise error
    folder, deadline = RunFolder(Path(over.run_dir)), time.monotonic() + VISIBLE_S
    while not folder.has_ending():
        if time.monotonic() > deadline:
            raise RankFailed(f"the run has ended, but {folder.path} holds no result here; look at it on the head")
        time.sleep(RETRY_S)
    return collect(folder)


@contextmanager
def _hearing(ranks: LocalRanks) -> Iterator[list[int]]:
    """The requests to stop, once they come: the first is for the ranks, a second one ends this host's part."""
    asked: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if asked and number == signal.SIGHUP:  # the terminal is gone, which is told more than once
            return
        if asked:
            raise Interrupted(f"ended by {name}; the other hosts see that this one is gone")
        if not ranks.pids:
            raise Stopped(f"stopped by {name} while no rank was here")
        asked.append(signal.SIGTERM if number == signal.SIGHUP else number)

    with handled(heeded((*SIGNALS, signal.SIGHUP)), hear):
        yield asked
