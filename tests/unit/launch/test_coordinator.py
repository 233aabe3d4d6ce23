"""The coordinator: how ranks are distributed, and which host it is. Runs on several hosts are in tests/cluster."""

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
from paceline.launch.cluster.coordinator import Coordinator, distributed


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_ranks_are_distributed_as_evenly_as_capacities_allow(capacities: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(0, sum(capacities)))
    counts = distributed(ranks, capacities)
    assert sum(counts) == ranks
    assert all(count <= most for count, most in zip(counts, capacities, strict=True))
    least = min((count for count, most in zip(counts, capacities, strict=True) if count < most), default=max(counts))
    assert max(counts) <= least + 1


def test_a_coordinator_that_has_finished_releases_its_address() -> None:
    listening = network.listen("127.0.0.1", 0)
    assert listening is not None
    port = listening.getsockname()[1]
    keys = {"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": f"127.0.0.1:{port}"}
    before = set(threading.enumerate())
    coordinator = Coordinator(build(keys), listening, b"key", print)
    (acceptor,) = set(threading.enumerate()) - before
    state = Path(f"/proc/self/task/{acceptor.native_id}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "S":  # it waits in accept()
        time.sleep(0.01)
    coordinator.finish(None)
    acceptor.join(10)
    assert not acceptor.is_alive()
    again = network.listen("127.0.0.1", port)
    assert again is not None
    again.close()


@pytest.mark.parametrize("address", ["n1", "n1:", ":29400", "n1:abc", "n1:0", "n1:99999"])
def test_a_rendezvous_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": address})
    assert caught.value.problems == [f"rendezvous={address!r} must be a host and a port, such as n1:29400"]


def test_the_coordinator_is_the_first_process_on_the_host_of_the_address() -> None:
    listening = network.listen("127.0.0.1", 0)
    assert listening is not None
    assert network.listen("127.0.0.1", listening.getsockname()[1]) is None
    assert network.listen("192.0.2.1", 29400) is None  # an address that no machine has
    listening.close()
    with pytest.raises(ConfigError, match="cannot be resolved"):
        network.listen("no-such-host.invalid", 29400)


def test_a_host_name_that_resolves_to_loopback_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda host: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"n1:0 is 127\.0\.1\.1 here, which other hosts cannot reach"):
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
    assert network.address_in("n1.lab:29400") == ("n1.lab", 29400)
