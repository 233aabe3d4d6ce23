"""Addresses and network interfaces. Connections between hosts are in `cluster/transport.py`."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress

from paceline.errors import ConfigError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
CONNECT_S = 10.0


class UnknownHost(ConfigError):
    """No address is known for the name of a host."""


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at this address; None if it belongs to another host, or another process listens there."""
    address = resolve(host)
    try:
        listening = socket.create_server((address, port))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise ConfigError(f"rendezvous={host}:{port} cannot be opened: {error.strerror}; choose another port") from None
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        listening.close()
        raise ConfigError(
            f"rendezvous={host}:{port} is {address} here, which other hosts cannot reach; give its IP address"
        )
    return listening


def address_in(rendezvous: str) -> tuple[str, int]:
    """The host and the port of `host:port`."""
    host, _, port = rendezvous.rpartition(":")
    return host, int(port)


def resolve(host: str) -> str:
    """The IPv4 address of a host."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise UnknownHost(
            f"rendezvous={host} cannot be resolved; give the name or address of a host, and a port"
        ) from None


def why_unreachable(address: str) -> str | None:
    """The reason why a connection to HOST:PORT fails; None if it succeeds, or for another kind of address."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return None


# --- interfaces ----------------------------------------------------------------------------------------------------


def interface_towards(host: str) -> str | None:
    """The interface on the route to a host; on that host itself, the interface with its address. None if unknown."""
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
    """The variables that make Gloo and NCCL use the interface on the route to a host, unless the user has set them."""
    known = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in (chosen or "").split(","):
        if name and name not in known:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={chosen} but this host has only {', '.join(known)}; unset it")
    found = interface_towards(host)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: found for name in names if found is not None and name not in os.environ}
