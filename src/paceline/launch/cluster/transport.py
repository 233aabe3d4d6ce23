"""Connections between the hosts of a run: the handshake, and messages that cannot be altered.

Both hosts have a key. The agent, which connects, proves this first, then the coordinator does. A proof covers the role
of its sender and a nonce of each side: it is not valid on another connection, or in the other role. Until both are
proved, only a fixed number of bytes is read. Every later message is JSON of a bounded size, with a code over its
direction, its number and its text, made with a key of this connection only. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from multiprocessing.connection import wait
from typing import Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.launch.network import resolve

Role = Literal["coordinator", "agent"]
T = TypeVar("T")

PROTOCOL = b"paceline rendezvous 3\n"
CODE_BYTES = 32  # of a nonce, a proof, and the code of a message
MAX_BYTES = 16 * 2**20  # in a message
HANDSHAKE_S = 10.0  # for the whole handshake
MESSAGE_S = 30.0  # for one message
# A connection is closed after 12 s without an answer from the other host's kernel; it survives shorter interruptions.
IDLE_S, PROBE_S, PROBES = 6, 2, 3


class HandshakeFailed(OSError):
    """The other side does not respond, has left, or is not a host of a run."""


class KeysDiffer(OSError):
    """The other side is a host of a run, but has a different key."""


class BadMessage(OSError):
    """A message was altered, repeated or dropped in transit, or is not of an expected kind."""


class Connection:
    """A connection between two hosts that have authenticated with the same key."""

    def __init__(self, raw: socket.socket, session_key: bytes, role: Role) -> None:
        self._raw, self._session_key = raw, session_key
        self._role, self._peer = role, _other(role)
        self._sent = self._received = 0

    def fileno(self) -> int:
        """The file descriptor, to wait for several connections at once."""
        return self._raw.fileno()

    @property
    def peer(self) -> str:
        """The IPv4 address of the other host."""
        return str(self._raw.getpeername()[0])

    def send(self, message: BaseModel) -> None:
        """Send one message."""
        text = message.model_dump_json().encode()
        frame = struct.pack("!I", len(text)) + self._code(self._role, self._sent, text) + text
        self._sent += 1
        _send(self._raw, frame, time.monotonic() + MESSAGE_S)

    def poll(self, timeout_s: float) -> bool:
        """Whether there is data to receive, or the other side has left; waits up to `timeout_s`."""
        return bool(wait([self._raw], timeout_s))

    def receive(self, kind: TypeAdapter[T]) -> T:
        """Wait for the next message. Raises EOFError if the other side has left, BadMessage if it is not genuine."""
        deadline = time.monotonic() + MESSAGE_S
        (size,) = struct.unpack("!I", _receive(self._raw, 4, deadline))
        if size > MAX_BYTES:
            raise BadMessage(f"a message of {size} bytes is too long")
        code, text = _receive(self._raw, CODE_BYTES, deadline), _receive(self._raw, size, deadline)
        if not hmac.compare_digest(code, self._code(self._peer, self._received, text)):
            raise BadMessage("a message was altered in transit")
        self._received += 1
        try:
            return kind.validate_json(text)
        except ValidationError as error:
            raise BadMessage(f"a message is not valid: {error.errors()[0]['msg']}") from None

    def _code(self, sender: Role, number: int, text: bytes) -> bytes:
        return _hmac(self._session_key, sender.encode(), struct.pack("!Q", number), text)

    def close(self) -> None:
        """Close the connection; the other side is notified immediately."""
        self._raw.close()


def connect(host: str, port: int, key: bytes) -> Connection:
    """Connect to the coordinator at this address. Raises OSError: KeysDiffer, HandshakeFailed and others."""
    return handshake(socket.create_connection((resolve(host), port), HANDSHAKE_S), key, "agent")


def handshake(raw: socket.socket, key: bytes, role: Role) -> Connection:
    """Authenticate to the other side with the key, and check its proof; closes `raw` if that fails."""
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
    """The key of this connection, after both sides have authenticated with the common key."""
    mine = secrets.token_bytes(CODE_BYTES)
    _send(raw, PROTOCOL + mine, deadline)
    if _receive(raw, len(PROTOCOL), deadline) != PROTOCOL:
        raise HandshakeFailed("it uses another protocol")
    theirs = _receive(raw, CODE_BYTES, deadline)
    nonces = mine + theirs if role == "agent" else theirs + mine
    proof, expected = (_hmac(key, PROTOCOL, b"proof of ", sender.encode(), nonces) for sender in (role, _other(role)))
    if role == "agent":
        _send(raw, proof, deadline)
    is_proved = hmac.compare_digest(_receive(raw, CODE_BYTES, deadline), expected)
    if role == "coordinator":
        _send(raw, proof if is_proved else bytes(CODE_BYTES), deadline)
    if not is_proved:
        raise KeysDiffer("the keys differ")
    return _hmac(key, PROTOCOL, b"session", nonces)


def _other(role: Role) -> Role:
    return "agent" if role == "coordinator" else "coordinator"


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _detect_lost_links(raw: socket.socket) -> None:
    """Make the kernel probe the other host, and send small messages without delay."""
    for option, value in ((socket.TCP_KEEPIDLE, IDLE_S), (socket.TCP_KEEPINTVL, PROBE_S), (socket.TCP_KEEPCNT, PROBES)):
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + PROBE_S * PROBES))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(raw: socket.socket, content: bytes, deadline: float) -> None:
    raw.settimeout(_seconds_until(deadline))
    raw.sendall(content)


def _receive(raw: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes."""
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
