"""A connection to a Ray cluster, its resources, and calls to Ray that leave the main thread free for signals."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from paceline.errors import ConfigError
from paceline.launch import network


class RayResources(NamedTuple):
    """The resources of a Ray cluster."""

    gpus: int
    cpus: int
    nodes: int

    def share(self, ranks: int, device: str) -> dict[str, float]:
        """The resources of each rank: a GPU if there are any, and a CPU, or an equal part of all CPUs."""
        share = {"CPU": min(1.0, self.cpus / ranks) or 1.0}
        return {**share, "GPU": 1.0} if device == "cuda" or (device == "auto" and self.gpus) else share

    def lacks(self, ranks: int, share: dict[str, float]) -> bool:
        """Whether the ranks must wait until the cluster grows."""
        return ranks * share.get("GPU", 0) > self.gpus or ranks * share["CPU"] > self.cpus

    def ranks_per_node(self, ranks: int) -> int:
        """The number of ranks per node, for this number of ranks."""
        return -(-ranks // self.nodes)


@contextmanager
def connected(device: str) -> Iterator[RayResources]:
    """Connect to the cluster of RAY_ADDRESS or of a local `ray start`, or start a cluster that ends with the run."""
    is_ours = not ray.is_initialized()
    before = signal.getsignal(signal.SIGTERM)
    if is_ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the only output that can be disabled
        _connect(os.environ.get("RAY_ADDRESS", ""))
        if threading.current_thread() is threading.main_thread():  # Ray has set its own handler
            signal.signal(signal.SIGTERM, before)
    try:
        has = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        yield RayResources(int(has.get("GPU", 0)) if device != "cpu" else 0, int(has.get("CPU", 0)), max(1, nodes))
    finally:
        if is_ours:
            ray.shutdown()


def _connect(address: str) -> None:
    try:
        if why := network.why_unreachable(address):  # Ray would retry for minutes
            raise ConnectionError(why)
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, RayError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not address:
            raise ConfigError(f"launcher=ray cannot start a local cluster: {why}; see `ray start --head`") from error
        raise ConfigError(f"RAY_ADDRESS={address} cannot be used: {why}; fix it, or unset it") from error


def in_thread(function: Callable[[], Any]) -> Future[None]:
    """Call a function in a daemon thread, so that this thread handles signals and does not have to wait for it."""
    done: Future[None] = Future()

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=call, name="paceline-ray", daemon=True).start()
    return done
