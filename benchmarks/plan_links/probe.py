"""What the links carry: every host sends to the next one at the same time, as in a ring, and prints the seconds.

probe.py BYTES NEXT_HOST: prints the seconds of a short message to the next host and back, and of BYTES to it.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from statistics import median

PORT, BLOCK = 29_500, 1 << 20


def serve(server: socket.socket) -> None:
    """Answer one byte with one byte, and then everything else with one byte."""
    connection, _ = server.accept()
    for _ in range(PINGS):
        connection.sendall(connection.recv(1))
    for _ in range(STREAMS):
        left = int(sys.argv[1])
        while left > 0:
            left -= len(connection.recv(min(left, BLOCK)))
        connection.sendall(b"x")
    connection.recv(1)


PINGS, STREAMS = 20, 4  # the windows of TCP grow during the first ones

server = socket.create_server(("", PORT))
thread = threading.Thread(target=serve, args=(server,))
thread.start()
while True:
    try:
        client = socket.create_connection((sys.argv[2], PORT))
        break
    except OSError:
        time.sleep(0.01)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
pings, streams = [], []
for _ in range(PINGS):
    began = time.perf_counter()
    client.sendall(b"x")
    client.recv(1)
    pings.append(time.perf_counter() - began)
for _ in range(STREAMS):
    began = time.perf_counter()
    client.sendall(bytes(int(sys.argv[1])))
    client.recv(1)
    streams.append(time.perf_counter() - began)
print(min(pings), median(streams[1:]))
client.sendall(b"x")
thread.join()
