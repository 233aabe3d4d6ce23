"""Accepts connections at the coordinator, and limits the number that have not authenticated with the key."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from paceline.launch.cluster.transport import Connection, handshake

MAX_UNPROVED = 64  # simultaneous connections that have not authenticated
RETRY_S = 0.5  # after a connection could not be accepted


class Listener:
    """Accepts connections in a thread, and passes those that authenticate with the key to `admit`.

    Each handshake has its own thread, so a silent connection delays no other. At most `MAX_UNPROVED` run at once:
    a further one closes the oldest.
    """

    def __init__(
        self, listening: socket.socket, key: bytes, admit: Callable[[Connection], None], report: Callable[[str], None]
    ) -> None:
        self._listening, self._key, self._admit, self._report = listening, key, admit, report
        self._unproved: dict[socket.socket, None] = {}  # in the order in which they were accepted
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
                self._report_once(f"a connection to {address} was not accepted: {error.strerror}; retrying")
                self._is_closed.wait(RETRY_S)
                continue
            with self._lock:
                if len(self._unproved) >= MAX_UNPROVED:
                    self._report_once(
                        f"more than {MAX_UNPROVED} connections to {address} have not authenticated; the "
                        "oldest are closed"
                    )
                    self._close_oldest()
                self._unproved[raw] = None
            try:
                threading.Thread(target=self._shake_hands, args=(raw,), daemon=True).start()
            except RuntimeError as error:  # the system allows no more threads
                with self._lock:
                    self._unproved.pop(raw, None)
                raw.close()
                self._report_once(f"a connection to {address} was not accepted: {error}; retrying")
                self._is_closed.wait(RETRY_S)

    def _close_oldest(self) -> None:
        oldest = next(iter(self._unproved))
        del self._unproved[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _shake_hands(self, raw: socket.socket) -> None:
        try:
            connection = handshake(raw, self._key, "coordinator")
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
        """Accept no more connections, and release the address."""
        self._is_closed.set()
        with suppress(OSError):
            self._listening.shutdown(
                socket.SHUT_RDWR
            )  # otherwise the thread that waits in accept() would keep the port
        self._listening.close()
