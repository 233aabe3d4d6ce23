"""Connections between hosts: which are admitted, what an attacker in between can do, what silent connections cost."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter

from paceline.config import build
from paceline.errors import ConfigError
from paceline.launch import network
from paceline.launch.cluster import agent, transport
from paceline.launch.cluster.listener import MAX_UNPROVED, Listener
from paceline.launch.cluster.messages import ORDER, RANKS_STATE, End, Over, RanksState, Signal, Start
from paceline.launch.cluster.transport import (
    BadMessage,
    Connection,
    HandshakeFailed,
    KeysDiffer,
    Role,
    connect,
    handshake,
)
from paceline.launch.fork_server import RankSpec
from paceline.observe.watchdog import DUMP_SIGNAL

KEY = b"k" * 32


class Text(BaseModel):
    text: str


TEXT = TypeAdapter(Text)


def shake(raw: socket.socket, key: bytes, role: Role) -> Connection | OSError:
    """The result of one side of a handshake."""
    try:
        return handshake(raw, key, role)
    except OSError as error:
        return error


def both(*work: Callable[[], object]) -> list[object]:
    """The results of functions that run at the same time."""
    results: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda n=n, do=do: results.update({n: do()}))  # type: ignore[misc]
        for n, do in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[n] for n in range(len(work))]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


@contextmanager
def connected(alter: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[Connection, Connection]]:
    """An agent and its coordinator; the agent's messages after the handshake pass a relay that may alter them."""
    ours, in_front = tcp_pair()
    behind, theirs = tcp_pair()
    shaken = threading.Event()

    def forward() -> None:
        with suppress(OSError):
            while data := in_front.recv(2**16):
                behind.sendall(alter(data) if shaken.is_set() else data)

    def backward() -> None:
        with suppress(OSError):
            while data := behind.recv(2**16):
                in_front.sendall(data)

    threads = [threading.Thread(target=forward), threading.Thread(target=backward)]
    for thread in threads:
        thread.start()
    left, right = both(lambda: handshake(ours, KEY, "agent"), lambda: handshake(theirs, KEY, "coordinator"))
    assert isinstance(left, Connection)
    assert isinstance(right, Connection)
    shaken.set()
    try:
        yield left, right
    finally:
        left.close()
        right.close()
        for thread in threads:
            thread.join()
        in_front.close()
        behind.close()


# --- admission -----------------------------------------------------------------------------------------------------


def test_both_sides_need_the_key() -> None:
    with connected() as (left, right):
        left.send(Text(text="hello"))
        right.send(Text(text="welcome"))
        assert right.receive(TEXT) == Text(text="hello")
        assert left.receive(TEXT) == Text(text="welcome")
    ours, theirs = tcp_pair()
    ends = both(lambda: shake(ours, KEY, "agent"), lambda: shake(theirs, b"x" * 32, "coordinator"))
    assert [type(end) for end in ends] == [KeysDiffer, KeysDiffer]


@pytest.mark.parametrize("role", ["coordinator", "agent"])
def test_two_sides_of_one_role_do_not_accept_each_other(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_S", 0.5)  # two coordinators wait for each other
    ours, theirs = tcp_pair()
    ends = both(lambda: shake(ours, KEY, role), lambda: shake(theirs, KEY, role))
    assert not [end for end in ends if isinstance(end, Connection)]


@pytest.mark.parametrize("attack", ["relay", "reflect"])
def test_a_process_that_takes_the_port_and_forwards_proofs_is_not_joined(attack: str) -> None:
    """Two hosts try to join at an attacker's port: it forwards what they send to the other one, or back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        keys = {"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2}
        config = build({**keys, "rendezvous": f"127.0.0.1:{port}"})

        def join() -> object:
            try:
                return agent.join(config, f"127.0.0.1:{port}", 5.0, print)
            except ConfigError as error:
                return str(error)

        def attack_two() -> bytes:
            raws = [listening.accept()[0] for _ in range(2)]
            to = raws[::-1] if attack == "relay" else raws

            def pass_on(source: socket.socket, target: socket.socket) -> bytes:
                received = b""
                with suppress(OSError):
                    while data := source.recv(2**16):
                        received += data
                        target.sendall(data)
                with suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return received

            received = both(*(lambda s=s, t=t: pass_on(s, t) for s, t in zip(raws, to, strict=True)))  # type: ignore[misc]
            for raw in raws:
                raw.close()
            return max(received, key=len)  # type: ignore[type-var, return-value]

        first, second, received = both(join, join, attack_two)
    refused = f"rendezvous=127.0.0.1:{port} and the run folder of this host have different keys"
    assert str(first).startswith(refused)
    assert str(second).startswith(refused)
    assert isinstance(received, bytes)
    assert len(received) == len(transport.PROTOCOL) + 2 * transport.CODE_BYTES  # a nonce and a proof, and no hello


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"\0\0\0\x3f#CHALLENGE#{sha256}" + b"x" * 80]
)
def test_another_program_fails_the_handshake(answer: bytes) -> None:
    ours, theirs = tcp_pair()
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeFailed):
        handshake(ours, KEY, "agent")
    theirs.close()


def test_a_handshake_has_a_time_limit_even_if_bytes_keep_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_S", 0.5)
    ours, theirs = tcp_pair()
    is_over = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            for byte in transport.PROTOCOL + bytes(1000):
                if is_over.wait(0.1):
                    return
                ours.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(HandshakeFailed):
        handshake(theirs, KEY, "coordinator")
    is_over.set()
    thread.join()
    ours.close()


# --- messages -------------------------------------------------------------------------------------------------------


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def change_the_text(data: bytes) -> bytes:
    return data.replace(b"save", b"kill")


@pytest.mark.parametrize("alter", [flip_last_bit, change_the_text, lambda data: data + data])
def test_a_message_that_a_relay_alters_or_repeats_ends_the_connection(alter: Callable[[bytes], bytes]) -> None:
    with connected(alter) as (left, right):
        left.send(Text(text="save"))
        with pytest.raises(BadMessage, match="altered"):  # noqa: PT012 - a repeated message is the second one
            right.receive(TEXT)
            right.receive(TEXT)


def test_a_message_cannot_be_sent_back_to_its_sender() -> None:
    with connected() as (left, right):
        left.send(Text(text="save"))
        frame = right._raw.recv(2**16)  # what a relay sees
        right._raw.sendall(frame)
        with pytest.raises(BadMessage, match="altered"):
            left.receive(TEXT)


def test_a_message_has_a_bounded_size() -> None:
    with connected() as (left, right):
        left._raw.sendall(b"\xff" * 64)
        with pytest.raises(BadMessage, match="too long"):
            right.receive(TEXT)


@pytest.mark.parametrize(
    "message",
    [
        Start(
            attempt=2, ranks=[RankSpec({"RANK": "1"}, "/work", "/run/rank-1.log", ("/run/job.bin", "", "1.5"), True)]
        ),
        Signal(number=10),
        Signal(number=DUMP_SIGNAL),
        End(number=15, grace_s=5),  # type: ignore[arg-type]
        Over(run_dir="/run"),
        Over(error="rank 1 failed", exit_code=2),
    ],
)
def test_orders_arrive_as_they_were_sent(message: BaseModel) -> None:
    with connected() as (left, right):
        right.send(message)
        arrived = left.receive(ORDER)
        assert arrived == message
        if isinstance(arrived, Start):
            assert isinstance(arrived.ranks[0], RankSpec)
        left.send(RanksState(attempt=1, pids={0: 4711}, codes={1: -9}))
        assert right.receive(RANKS_STATE).codes == {1: -9}


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"type": "run", "command": "id"}', '{"type": "signal", "number": 999}', '{"type": "over", "x": 1}'],
)
def test_a_message_that_is_not_valid_ends_the_connection(text: str) -> None:
    class Raw(BaseModel):
        def model_dump_json(self, **_: object) -> str:  # type: ignore[override]
            return text

    with connected() as (left, right):
        right.send(Raw())
        with pytest.raises(BadMessage, match="not valid"):
            left.receive(ORDER)


# --- limits ---------------------------------------------------------------------------------------------------------


class Listening:
    """A listener, its reports, and the hosts that it admits."""

    def __init__(self) -> None:
        listening = network.listen("127.0.0.1", 0)
        assert listening is not None
        self.port = listening.getsockname()[1]
        self.reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.listener = Listener(listening, KEY, self.admitted.put, self.reports.put)

    def join(self) -> None:
        """Check that a host that knows the key is admitted."""
        connection = connect("127.0.0.1", self.port, KEY)
        self.admitted.get(timeout=10).close()
        connection.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    one = Listening()
    yield one
    one.listener.close()


def test_silent_connections_keep_no_host_out(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_S", 600)  # so that they are not closed for their silence
    silent = [socket.create_connection(("127.0.0.1", listening.port)) for _ in range(MAX_UNPROVED + 40)]
    report = listening.reports.get(timeout=10)
    assert report.startswith(f"more than 64 connections to 127.0.0.1:{listening.port} have not authenticated")
    listening.join()
    silent[0].settimeout(10)
    while silent[0].recv(2**16):  # the nonce of the coordinator, then the end: the oldest was closed
        pass
    for one in silent:
        one.close()
    assert listening.reports.empty()


def test_a_listener_survives_that_no_file_can_be_opened(listening: Listening) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    taken, used = [], [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 8, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        waiting.connect(("127.0.0.1", listening.port))
        report = listening.reports.get(timeout=10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    assert report == f"a connection to 127.0.0.1:{listening.port} was not accepted: Too many open files; retrying"
    connection = handshake(waiting, KEY, "agent")
    listening.admitted.get(timeout=10).close()
    connection.close()
    assert listening.reports.empty()


def test_a_listener_survives_that_no_thread_can_start(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(("127.0.0.1", listening.port)) as refused:
        report = listening.reports.get(timeout=10)
        refused.settimeout(10)
        assert refused.recv(1) == b""
    assert report.endswith("was not accepted: can't start new thread; retrying")
    connection = connect("127.0.0.1", listening.port, KEY)
    listening.admitted.get(timeout=10).close()
    connection.close()
