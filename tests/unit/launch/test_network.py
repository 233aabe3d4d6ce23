"""Why an address cannot be reached."""

from __future__ import annotations

import socket

from paceline.launch.network import why_unreachable


def test_an_address_that_does_not_answer_is_explained_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert why_unreachable(f"127.0.0.1:{port}") is None
        assert why_unreachable(f"ray://127.0.0.1:{port}") is None
    assert why_unreachable(f"127.0.0.1:{port}") == "Connection refused"
    assert why_unreachable(f"ray://127.0.0.1:{port}") == "Connection refused"
    assert why_unreachable("no-such-host.invalid:6379") is not None


def test_an_address_without_host_and_port_is_not_checked() -> None:
    assert [why_unreachable(address) for address in ("", "auto", "local", "anyscale://cluster")] == [None] * 4
