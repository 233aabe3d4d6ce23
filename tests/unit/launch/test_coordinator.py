"""launch/hosts.py and launch/network.py: who gets which ranks, and who is the head. Real hosts are in tests/cluster."""

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
from paceline.launch.cluster.coordinator import Hosts, address_in, seated


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_ranks_are_spread_as_evenly_as_rooms_allow(rooms: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(0, sum(rooms)))
    seats = seated(ranks, rooms)
    assert sum(seats) == ranks
    assert all(taken <= room for taken, room in zip(seats, rooms, strict=True))
    least = min((taken for taken, room in zip(seats, rooms, strict=True) if taken < room), default=max(seats))
    assert max(seats) <= least + 1


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


@pytest.mark.parametrize("address", ["n1", "n1:", ":29400", "n1:abc", "n1:0", "n1:99999"])
def test_a_rendezvous_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": address})
    assert caught.value.problems == [f"rendezvous={address!r} must be a host and a port, such as n1:29400"]


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
