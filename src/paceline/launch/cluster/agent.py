"""The agent of a run on another host: reports its capacity to the coordinator, and starts and ends ranks for it."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError, RankFailed
from paceline.launch import kubernetes, network, processes
from paceline.launch.cluster.coordinator import GATHER_S, LOG_S
from paceline.launch.cluster.identity import fingerprint, versions
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
from paceline.launch.fork_server import POLL_S
from paceline.launch.machines import StopSender, capacity
from paceline.launch.processes import LocalRanks
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome, collect
from paceline.system.signals import StopRequest, listening

RECONNECT_S = 60.0  # for a coordinator that no longer responds
RETRY_S = 0.5
VISIBLE_S = 60.0  # for NFS to show what another host has written
MAX_FAILED_HANDSHAKES = 3  # consecutive, until the port is considered to be used by another program
GRACE_S = 5.0

Log = Callable[[str], None]


def serve(config: Config, log: Log) -> Outcome:
    """Participate in a run until its coordinator reports the end; returns the outcome of the run."""
    assert config.rendezvous is not None
    request, timeout_s = StopRequest(), GATHER_S
    ending = "the other hosts continue without this one"
    with (
        processes.ranks(is_passive=True) as ranks,
        listening(request, ending, lambda: _stop_without_ranks(request, ranks)),
    ):
        while True:
            connection = join(config, config.rendezvous, timeout_s, log)
            try:
                # By its number: the name may get another address, which is not known everywhere at once.
                variables = {**network.variables_towards(connection.peer), "MASTER_ADDR": connection.peer}
                over = _obey(connection, ranks, variables, request, log)
            except (EOFError, OSError) as error:
                timeout_s = GATHER_S if kubernetes.index() is not None else RECONNECT_S  # until its pod is replaced
                why = f" ({error})" if isinstance(error, BadMessage) else ""
                log(f"the coordinator at {config.rendezvous} no longer responds{why}; reconnecting")
            else:
                return _outcome_of(over)
            finally:
                ranks.end(signal.SIGKILL, GRACE_S)
                connection.close()


def _stop_without_ranks(request: StopRequest, ranks: LocalRanks) -> None:
    """Stop immediately if no rank has state to save."""
    if not ranks.pids:
        raise request.stopped("while no rank was running here")


def join(config: Config, rendezvous: str, timeout_s: float, log: Log) -> Connection:
    """Connect to the coordinator and wait until it admits this host."""
    host, port = network.address_in(rendezvous)
    began = logged_at = time.monotonic()
    failed_handshakes, is_pod = 0, kubernetes.index() is not None
    while True:
        try:
            connection = connect(host, port, key_of(config))
            answer = _introduce(connection, config)
        except (EOFError, OSError, network.UnknownHost) as error:
            now = time.monotonic()
            failed_handshakes = failed_handshakes + 1 if isinstance(error, HandshakeFailed) else 0
            if not is_pod:  # in a pod, the name may not be known yet, or lead to the next user of an old address
                _raise_if_lasting(error, rendezvous, failed_handshakes)
            if now - began > timeout_s:
                raise kubernetes.retried(
                    RankFailed(
                        f"no coordinator responded at {rendezvous} for {timeout_s:.0f} s ({error}); the run may have "
                        "ended"
                    )
                ) from None
            if logged_at == began or now - logged_at > LOG_S:
                logged_at = now
                log(f"waiting for the coordinator at {rendezvous}")
            time.sleep(RETRY_S)
            continue
        if isinstance(answer, Refused):
            connection.close()
            raise ConfigError(f"rendezvous={rendezvous} requires the same versions on all hosts: {answer.reason}")
        log(f"joined {answer.name} at {rendezvous}")
        return connection


def _raise_if_lasting(error: Exception, rendezvous: str, failed_handshakes: int) -> None:
    """Raise a ConfigError if another attempt to connect would fail in the same way."""
    if isinstance(error, network.UnknownHost):
        raise error
    if isinstance(error, KeysDiffer):
        raise ConfigError(
            f"rendezvous={rendezvous} and the run folder of this host have different keys; all hosts need the same "
            "shared folder, and must start in the same place in it"
        ) from None
    if failed_handshakes >= MAX_FAILED_HANDSHAKES:
        raise ConfigError(f"rendezvous={rendezvous} is used by another program; choose another port") from None


def _introduce(connection: Connection, config: Config) -> Welcome | Refused:
    """Introduce this host to the coordinator, and return its reply."""
    try:
        hello = Hello(
            name=socket.gethostname(), capacity=capacity(config)[1], versions=versions(), config=fingerprint(config)
        )
        connection.send(hello)
        return connection.receive(ANSWER)
    except BaseException:
        connection.close()
        raise


def _obey(connection: Connection, ranks: LocalRanks, variables: dict[str, str], request: StopRequest, log: Log) -> Over:
    """Follow the coordinator's orders until the run is over; report the ranks' state, and forward signals to them."""
    reported: tuple[dict[int, int], dict[int, int]] = ({}, {})
    attempt, sender = 0, StopSender(ranks)
    while True:
        while connection.poll(0 if ranks.pids else POLL_S):
            order = connection.receive(ORDER)
            match order:
                case Start():
                    attempt = order.attempt
                    ranks.start([spec._replace(variables={**spec.variables, **variables}) for spec in order.ranks])
                case Signal():
                    ranks.signal(order.number)
                case End():
                    ranks.end(order.number, order.grace_s)
                case Over():
                    return order
        if sender.send(request.for_ranks):
            log(f"{request.name}: all ranks save and stop; a second signal ends the ranks of this host immediately")
        ranks.poll(POLL_S)
        if reported != (ranks.pids, ranks.codes):
            reported = (dict(ranks.pids), dict(ranks.codes))
            connection.send(RanksState(attempt=attempt, pids=reported[0], codes=reported[1]))


def _outcome_of(over: Over) -> Outcome:
    """The outcome in the shared folder, which a network file system may show with a delay; or the error of the run."""
    if over.run_dir is None:
        error = ConfigError(over.error) if over.exit_code == ConfigError.exit_code else RankFailed(over.error)
        error.exit_code = over.exit_code
        raise error
    folder, deadline = RunFolder(Path(over.run_dir)), time.monotonic() + VISIBLE_S
    while not folder.has_ending():
        if time.monotonic() > deadline:
            raise RankFailed(
                f"the run has ended, but {folder.path} contains no result here; check it on the coordinator's host"
            )
        time.sleep(RETRY_S)
    return collect(folder)
