"""The way from one host to another: addresses, interfaces, and connections that know when they are cut."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from paceline.errors import ConfigError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
GREETING_S = 10.0  # for whoever knocks to prove that it knows the key
# A connection is given up after 12 s without an answer from the other host's kernel; a shorter cut is survived.
IDLE_S, PROBE_S, PROBES = 6, 2, 3


class NoGreeting(OSError):
    """Somebody is there, and does not say what one of us would."""


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at this address; None if it is another host's, or taken by a process that was earlier."""
    address = resolve(host)
    try:
        door = socket.create_server((address, port))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise ConfigError(f"rendezvous={host}:{port} cannot be opened: {error.strerror}; use another port") from None
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        door.close()
        raise ConfigError(
            f"rendezvous={host}:{port} is {address} here, where no other host can reach it; give its address as numbers"
        )
    return door


def resolve(host: str) -> str:
    """The IPv4 address of a host."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise ConfigError(f"rendezvous={host} is not known here; give a host's name or address, and a port") from None


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection to whoever listens there. Raises OSError: PermissionError if the two keys differ."""
    return greeted(socket.create_connection((resolve(host), port), GREETING_S), key, is_host=False)


def why_unreachable(address: str) -> str | None:
    """Why nobody answers at HOST:PORT, in a few words; None if somebody does, or if it is another kind of address."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), GREETING_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return None


def greeted(raw: socket.socket, key: bytes, *, is_host: bool) -> Connection:
    """Both sides prove that they know the key before anything of the other is unpickled."""
    raw.setblocking(True)
    for option, value in ((socket.TCP_KEEPIDLE, IDLE_S), (socket.TCP_KEEPINTVL, PROBE_S), (socket.TCP_KEEPCNT, PROBES)):
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + PROBE_S * PROBES))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_patience(raw, GREETING_S)
    connection = Connection(os.dup(raw.fileno()))
    try:
        for step in (deliver_challenge, answer_challenge) if is_host else (answer_challenge, deliver_challenge):
            step(connection, key)
        _set_patience(raw, 0)
    except (OSError, EOFError) as error:
        connection.close()
        raise NoGreeting(str(error)) from None
    except (ProcessError, AssertionError, ValueError):  # it does not know the key, or speaks another language
        connection.close()
        raise PermissionError("the keys differ") from None
    finally:
        raw.close()
    return connection


def _set_patience(raw: socket.socket, seconds: float) -> None:
    """How long a read or write may take; 0 for ever."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


# --- interfaces ----------------------------------------------------------------------------------------------------


def interface_towards(host: str) -> str | None:
    """The interface that leads to a host; on that host itself, the one that has its address. None if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolve(host), 9))  # nothing is sent
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                if address_of(name, probe) == mine:
                    return name
    return None


def address_of(interface: str, any_socket: socket.socket) -> str:
    """The IPv4 address of an interface."""
    answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def variables_towards(host: str) -> dict[str, str]:
    """What Gloo and NCCL must be told to use the interface that leads to a host; what the user has set is left."""
    known = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in (chosen or "").split(","):
        if name and name not in known:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={chosen} but this host has only {', '.join(known)}; leave it unset")
    found = interface_towards(host)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: found for name in names if found is not None and name not in os.environ}
