"""Connections between the hosts of a run: the handshake, messages that cannot be altered, and a listener with limits.

Both hosts know a key. The host that connects proves this first, then the head does. A proof covers the role of its
sender and a nonce of each side: it is worth nothing on another connection, or in the other role. Until both are proved,
only a fixed number of bytes is read. Every later message is JSON of a bounded size, with a code over its direction, its
number and its text, made with a key of this connection alone. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.launch.network import resolve

Role = Literal["head", "guest"]
T = TypeVar("T")

PROTOCOL = b"paceline rendezvous 2\n"
CODE_BYTES = 32  # of a nonce, a proof, and the code of a message
MOST_BYTES = 16 * 2**20  # in a message
HANDSHAKE_S = 10.0  # for the whole handshake
MESSAGE_S = 30.0  # for one message
MOST_UNPROVED = 64  # connections at once that have not proved to know the key
RETRY_S = 0.5  # after a connection could not be accepted
# A connection is closed after 12 s without an answer from the other host's kernel; a shorter interruption is survived.
IDLE_S, PROBE_S, PROBES = 6, 2, 3


class HandshakeFailed(OSError):
    """The other side is silent, left, or is not a host of a run."""


class KeysDiffer(OSError):
    """The other side is a host of a run, and knows another key."""


class BadMessage(OSError):
    """A message was altered, repeated or left out on its way, or is none of those that are expected."""


class Connection:
    """A connection between two hosts that have proved to know the same key."""

    def __init__(self, raw: socket.socket, session_key: bytes, role: Role) -> None:
        self._raw, self._session_key = raw, session_key
        self._role, self._peer = role, _other(role)
        self._sent = self._received = 0

    def fileno(self) -> int:
        """The number of the file, to wait for several connections at once."""
        return self._raw.fileno()

    def send(self, message: BaseModel) -> None:
        """Send one message."""
        text = message.model_dump_json().encode()
        frame = struct.pack("!I", len(text)) + self._code(self._role, self._sent, text) + text
        self._sent += 1
        _send(self._raw, frame, time.monotonic() + MESSAGE_S)

    def poll(self, seconds: float) -> bool:
        """Whether there is something to receive, or the other side has left; waits for it for so long."""
        return bool(wait([self._raw], seconds))

    def receive(self, kind: TypeAdapter[T]) -> T:
        """Wait for the next message. Raises EOFError if the other side has left, BadMessage if it is not genuine."""
        deadline = time.monotonic() + MESSAGE_S
        (size,) = struct.unpack("!I", _receive(self._raw, 4, deadline))
        if size > MOST_BYTES:
            raise BadMessage(f"a message of {size} bytes is too long")
        code, text = _receive(self._raw, CODE_BYTES, deadline), _receive(self._raw, size, deadline)
        if not hmac.compare_digest(code, self._code(self._peer, self._received, text)):
            raise BadMessage("a message was altered on its way")
        self._received += 1
        try:
            return kind.validate_json(text)
        except ValidationError as error:
            raise BadMessage(f"a message is not valid: {error.errors()[0]['msg']}") from None

    def _code(self, sender: Role, number: int, text: bytes) -> bytes:
        return _hmac(self._session_key, sender.encode(), struct.pack("!Q", number), text)

    def close(self) -> None:
        """Close it; the other side sees that at once."""
        self._raw.close()


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection to the head that listens there. Raises OSError: KeysDiffer, HandshakeFailed and others."""
    return handshake(socket.create_connection((resolve(host), port), HANDSHAKE_S), key, "guest")


def handshake(raw: socket.socket, key: bytes, role: Role) -> Connection:
    """Prove to the other side that this one knows the key, and have it prove the same; closes `raw` if one fails."""
    deadline = time.monotonic() + HANDSHAKE_S
    try:
        _detect_lost_links(raw)
        session_key = _exchange_proofs(raw, key, role, deadline)
    except KeysDiffer:
        raw.close()
        raise
    except (OSError, EOFError) as error:
        raw.close()
        raise HandshakeFailed(str(error)) from None
    return Connection(raw, session_key, role)


def _exchange_proofs(raw: socket.socket, key: bytes, role: Role, deadline: float) -> bytes:
    """The key of this connection, once both sides have proved to know the common one."""
    mine = secrets.token_bytes(CODE_BYTES)
    _send(raw, PROTOCOL + mine, deadline)
    if _receive(raw, len(PROTOCOL), deadline) != PROTOCOL:
        raise HandshakeFailed("it speaks another protocol")
    theirs = _receive(raw, CODE_BYTES, deadline)
    nonces = mine + theirs if role == "guest" else theirs + mine
    proof, expected = (_hmac(key, PROTOCOL, b"proof of ", who.encode(), nonces) for who in (role, _other(role)))
    if role == "guest":
        _send(raw, proof, deadline)
    is_proved = hmac.compare_digest(_receive(raw, CODE_BYTES, deadline), expected)
    if role == "head":
        _send(raw, proof if is_proved else bytes(CODE_BYTES), deadline)
    if not is_proved:
        raise KeysDiffer("the keys differ")
    return _hmac(key, PROTOCOL, b"session", nonces)


def _other(role: Role) -> Role:
    return "guest" if role == "head" else "head"


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _detect_lost_links(raw: socket.socket) -> None:
    """Have the kernel probe the other host, and send small messages at once."""
    for option, value in ((socket.TCP_KEEPIDLE, IDLE_S), (socket.TCP_KEEPINTVL, PROBE_S), (socket.TCP_KEEPCNT, PROBES)):
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + PROBE_S * PROBES))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(raw: socket.socket, content: bytes, deadline: float) -> None:
    raw.settimeout(_seconds_until(deadline))
    raw.sendall(content)


def _receive(raw: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly so many bytes."""
    content = b""
    while len(content) < size:
        raw.settimeout(_seconds_until(deadline))
        part = raw.recv(min(size - len(content), 2**16))
        if not part:
            raise EOFError("the connection was closed")
        content += part
    return content


def _seconds_until(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


class Listener:
    """Accepts connections in a thread, and hands over those whose other side knows the key.

    Each handshake has a thread of its own, so a silent connection delays no other. There are at most `MOST_UNPROVED`:
    one more closes the oldest.
    """

    def __init__(
        self, listening: socket.socket, key: bytes, admit: Callable[[Connection], None], report: Callable[[str], None]
    ) -> None:
        self._listening, self._key, self._admit, self._report = listening, key, admit, report
        self._unproved: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, name="paceline-listener", daemon=True).start()

    def _accept(self) -> None:
        address = "{}:{}".format(*self._listening.getsockname())
        while True:
            try:
                raw, _ = self._listening.accept()
            except OSError as error:
                if self._is_closed.is_set():
                    return
                self._report_once(f"a connection to {address} was not accepted: {error.strerror}; trying again")
                self._is_closed.wait(RETRY_S)
                continue
            with self._lock:
                if len(self._unproved) >= MOST_UNPROVED:
                    self._report_once(
                        f"more than {MOST_UNPROVED} connections to {address} have not proved to know the key; the "
                        "oldest are closed"
                    )
                    self._close_oldest()
                self._unproved[raw] = None
            try:
                threading.Thread(target=self._greet, args=(raw,), daemon=True).start()
            except RuntimeError as error:  # as many threads as the system allows
                with self._lock:
                    self._unproved.pop(raw, None)
                raw.close()
                self._report_once(f"a connection to {address} was not accepted: {error}; trying again")
                self._is_closed.wait(RETRY_S)

    def _close_oldest(self) -> None:
        oldest = next(iter(self._unproved))
        del self._unproved[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _greet(self, raw: socket.socket) -> None:
        try:
            connection = handshake(raw, self._key, "head")
        except OSError:
            return
        finally:
            with self._lock:
                self._unproved.pop(raw, None)
        self._admit(connection)

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def close(self) -> None:
        """Accept no more connections, and give the address back."""
        self._is_closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # or the thread that waits there would keep the port
        self._listening.close()
