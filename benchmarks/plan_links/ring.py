"""Speed and latency of the link from this host to the next one in a ring, while all hosts of the ring measure theirs.

    python ring.py OWN_ADDRESS NEXT_ADDRESS BYTES PINGS

Prints bytes per second and half of the median time of a ping, as a JSON list.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from statistics import median

PORT, PIECE = 29_500, 1 << 18


def main(own: str, following: str, size: int, pings: int) -> None:
    """Answer the previous host and measure the next one at the same time."""
    listener = socket.create_server((own, PORT))
    answering = threading.Thread(target=_answer, args=(listener, size, pings))
    answering.start()
    link = _connect(following)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(pings):
        began = time.perf_counter()
        link.sendall(b"p")
        _receive(link, 1)
        times.append(time.perf_counter() - began)
    piece = bytes(PIECE)
    began = time.perf_counter()
    for sent in range(0, size, PIECE):
        link.sendall(piece[: size - sent])
    _receive(link, 1)
    seconds = time.perf_counter() - began
    answering.join()
    print(json.dumps([size / seconds, median(times) / 2]))


def _connect(address: str) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection((address, PORT), timeout=60)
        except ConnectionRefusedError:  # that host has not started yet
            time.sleep(0.02)
    raise TimeoutError(f"{address} does not answer")


def _answer(listener: socket.socket, size: int, pings: int) -> None:
    link, _ = listener.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(pings):
        _receive(link, 1)
        link.sendall(b"p")
    _receive(link, size)
    link.sendall(b"p")


def _receive(link: socket.socket, size: int) -> None:
    while size:
        received = len(link.recv(min(size, PIECE)))
        if not received:
            raise ConnectionError("the other host has closed the connection")
        size -= received


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
