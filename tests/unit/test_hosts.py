"""launch/hosts.py and launch/network.py: who gets which ranks, and who is let in. Real hosts are in tests/cluster."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import build
from paceline.errors import ConfigError
from paceline.launch import network
from paceline.launch.hosts import Hosts, address_in, key_of, seated


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_ranks_are_spread_as_evenly_as_rooms_allow(rooms: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(0, sum(rooms)))
    seats = seated(ranks, rooms)
    assert sum(seats) == ranks
    assert all(taken <= room for taken, room in zip(seats, rooms, strict=True))
    least = min((taken for taken, room in zip(seats, rooms, strict=True) if taken < room), default=max(seats))
    assert max(seats) <= least + 1


def test_a_key_is_made_once_and_is_private() -> None:
    config = build({"train_fn": print, "model_fn": print, "dataset_fn": print, "name": "lab"})
    assert key_of(config) == key_of(config)
    assert len(key_of(config)) == 32
    assert oct(Path("runs/lab/.key").stat().st_mode)[-3:] == "600"
    assert [path.name for path in Path("runs/lab").iterdir()] == [".key"]


def test_a_folder_that_cannot_hold_the_key_is_named() -> None:
    Path("taken").touch()
    keys = {"train_fn": print, "model_fn": print, "dataset_fn": print, "run_dir": "taken"}
    with pytest.raises(ConfigError, match="run_dir=taken cannot hold the key that the hosts share: File exists; "):
        key_of(build(keys))


def test_a_head_that_is_done_leaves_its_address_to_the_next_run() -> None:
    door = network.listen("127.0.0.1", 0)
    assert door is not None
    port = door.getsockname()[1]
    keys = {"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": f"127.0.0.1:{port}"}
    waiting = set(threading.enumerate())
    site = Hosts(build(keys), door, b"key", print)
    (at_the_door,) = set(threading.enumerate()) - waiting
    state = Path(f"/proc/self/task/{at_the_door.native_id}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "S":  # it sleeps there
        time.sleep(0.01)
    site.part(None)
    at_the_door.join(10)
    assert not at_the_door.is_alive()
    again = network.listen("127.0.0.1", port)
    assert again is not None
    again.close()


def greet(theirs: bytes, ours: bytes) -> tuple[object, object]:
    """What both sides come to."""
    door = network.listen("localhost", 0)
    assert door is not None
    heard: list[object] = []

    def host() -> None:
        knocking, _ = door.accept()
        try:
            heard.append(network.greeted(knocking, theirs, is_host=True).recv())
        except OSError as error:
            heard.append(type(error))

    thread = threading.Thread(target=host)
    thread.start()
    answer: object = None
    try:
        with network.connect("localhost", door.getsockname()[1], ours) as connection:
            connection.send("hello")
            thread.join()
    except OSError as error:
        answer = type(error)
    thread.join()
    door.close()
    return heard[0], answer


def test_a_connection_needs_the_key() -> None:
    assert greet(b"k" * 32, b"k" * 32) == ("hello", None)
    heard, answer = greet(b"k" * 32, b"x" * 32)
    assert heard in (PermissionError, OSError)
    assert answer is PermissionError


@pytest.mark.parametrize("address", ["n1", "n1:", ":29400", "n1:abc", "n1:0", "n1:99999"])
def test_a_rendezvous_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": address})
    assert caught.value.problems == [f"rendezvous={address!r} must be a host and a port, such as n1:29400"]


def test_whoever_does_not_speak_at_all_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "GREETING_S", 1)
    silent, knocking = socket.create_server(("127.0.0.1", 0)), socket.socket()
    knocking.connect(silent.getsockname())
    accepted, _ = silent.accept()
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system calls it
        network.greeted(accepted, b"key", is_host=True)
    silent.close()
    knocking.close()


def test_the_head_is_whoever_owns_the_address_and_came_first() -> None:
    door = network.listen("127.0.0.1", 0)
    assert door is not None
    assert network.listen("127.0.0.1", door.getsockname()[1]) is None
    assert network.listen("192.0.2.1", 29400) is None  # an address that no machine has
    door.close()
    with pytest.raises(ConfigError, match="is not known here"):
        network.listen("no-such-host.invalid", 29400)


def test_a_name_that_leads_to_loopback_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda host: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"n1:0 is 127\.0\.1\.1 here, where no other host can reach it"):
        network.listen("n1", 0)


def test_the_interface_is_the_one_that_leads_to_the_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = network.interface_towards("127.0.0.1")
    assert loopback in [name for _, name in socket.if_nameindex()]
    assert network.variables_towards("localhost") == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=eth77 but this host has only"):
        network.variables_towards("localhost")


def test_an_address_has_a_host_and_a_port() -> None:
    assert address_in("n1.lab:29400") == ("n1.lab", 29400)
