"""An S3 server on this machine (moto), and a proxy before it that refuses, delays, truncates or rejects requests."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SERVER = """
import socket, sys
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
EXPIRED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"""


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of an S3 server that runs inside the context."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


class FaultyProxy:
    """Passes requests to a server; `fault(method, path)` returns "refuse", "slow", "truncate", "expired" or None."""

    def __init__(self, port: int) -> None:
        self.target, self.faults = port, list[str]()
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def pass_on(self) -> None:
                fault = proxy.fault(self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if fault:
                    proxy.faults.append(fault)
                if fault == "refuse":
                    self.close_connection = True
                    return
                if fault == "expired":
                    self.answer(403, {"Content-Type": "application/xml"}, EXPIRED)
                    return
                if fault == "slow":
                    time.sleep(0.2)
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() not in ("host", "expect")
                }
                if fault == "truncate":
                    body = body[: len(body) // 2]
                    headers = {
                        name: value for name, value in headers.items()
                        if not name.lower().startswith(("content-md5", "x-amz-checksum"))
                    } | {"Content-Length": str(len(body))}  # fmt: skip
                connection = http.client.HTTPConnection("127.0.0.1", proxy.target)
                try:
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    self.answer(response.status, dict(response.getheaders()), response.read())
                finally:
                    connection.close()

            def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "date", "server", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                lengths = [value for name, value in headers.items() if name.lower() == "content-length"]
                is_head = self.command == "HEAD" and lengths
                self.send_header("Content-Length", lengths[0] if is_head else str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    with suppress(BrokenPipeError, ConnectionResetError):
                        self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End the proxy."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def create_bucket(port: int, name: str) -> None:
    """Create a bucket."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request):
        pass
