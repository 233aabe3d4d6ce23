"""The time of collectives between ranks, from the speed and the latency of their links (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.tools.plan.links import Link

GLOO_SEGMENT = 1 << 20  # bytes at most; a chunk of a ring has two segments at least
EXCHANGE_BYTES = 64  # the numbers that ranks exchange in each step


@dataclass(frozen=True)
class Network:
    """The ranks of a run and what connects them; ranks of one host are neighbours in a ring."""

    ranks: int
    per_host: int
    link: Link  # between hosts
    local: Link  # between two ranks of one host, with the cost of the library
    backend: str = "gloo"
    shared: Link | None = None  # the memory of the only host, if gradients are summed through it

    def without_latency(self) -> Network:
        """The same network, whose messages arrive at once."""
        link, local = replace(self.link, latency_s=0.0), replace(self.local, latency_s=0.0)
        shared = replace(self.shared, latency_s=0.0) if self.shared is not None else None
        return replace(self, link=link, local=local, shared=shared)

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return -(-self.ranks // self.per_host)

    @property
    def bytes_per_s(self) -> float:
        """The speed of the slowest part of a ring."""
        return self.local.bytes_per_s if self.hosts == 1 else min(self.link.bytes_per_s, self.local.bytes_per_s)

    @property
    def latency_s(self) -> float:
        """The latency of the longest hop: that between hosts, if there are several."""
        return self.local.latency_s + (self.link.latency_s if self.hosts > 1 else 0.0)

    @property
    def mean_latency_s(self) -> float:
        """The mean latency of the hops of a ring."""
        between = self.hosts if self.hosts > 1 else 0
        return self.local.latency_s + between / self.ranks * self.link.latency_s


@dataclass(frozen=True)
class CollectiveCost:
    """The seconds of a collective, and those in which it occupies the link."""

    seconds: float
    link_s: float

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        return CollectiveCost(self.seconds + other.seconds, self.link_s + other.link_s)


NOTHING = CollectiveCost(0.0, 0.0)


def all_reduce(size: float, network: Network, *, parts: int = 1) -> CollectiveCost:
    """The cost of summing `size` bytes over all ranks, sent in this number of equal parts at once."""
    if network.ranks == 1 or not size:
        return NOTHING
    if network.shared is not None:
        return _through_memory(size, network.ranks, network.shared)
    if network.backend == "nccl":
        return _nccl(size, network)
    return gloo_ring(size, network, parts=parts)


def gloo_ring(size: float, network: Network, *, parts: int = 1) -> CollectiveCost:
    """Gloo's ring: a reduce-scatter and an all-gather, each of ranks − 1 chunks, which pass in segments.

    A sender starts when the receiver has announced that it is ready, so a segment takes two latencies besides its
    bytes, and the next but one is announced when it has arrived. A rank behind the longest hop does so for each of its
    segments, and all others wait for it.
    """
    ranks = network.ranks
    segments = max(2 * ranks, math.ceil(size / parts / GLOO_SEGMENT))
    segments = -(-segments // ranks) * ranks
    count = segments - segments // ranks  # that a rank sends in each of the two halves
    segment_s, notice_s = size / segments / network.bytes_per_s, 2 * network.latency_s
    half = max(notice_s + count * segment_s, count / 2 * notice_s + (count / 2 + 1) * segment_s)
    return CollectiveCost(2 * half, 2 * count * segment_s)


def _through_memory(size: float, ranks: int, memory: Link) -> CollectiveCost:
    """Each rank writes its tensor to memory, waits for the others, and adds theirs."""
    copied_s = ranks * size / memory.bytes_per_s
    return CollectiveCost(memory.latency_s + copied_s, copied_s)


def _nccl(size: float, network: Network) -> CollectiveCost:
    """The faster of NCCL's ring and its tree."""
    ranks = network.ranks
    ring_s = 2 * (ranks - 1) / ranks * size / network.bytes_per_s
    tree_s = 2 * size / network.bytes_per_s
    ring = CollectiveCost(ring_s + 2 * (ranks - 1) * network.mean_latency_s, ring_s)
    tree = CollectiveCost(tree_s + 2 * math.ceil(math.log2(ranks)) * network.latency_s, tree_s)
    return min(ring, tree, key=lambda cost: cost.seconds)


def broadcast(size: float, network: Network) -> CollectiveCost:
    """The cost of sending `size` bytes from one rank to all: in rounds, in each of which twice as many have them."""
    if network.ranks == 1 or not size:
        return NOTHING
    rounds = math.ceil(math.log2(network.ranks))
    notices = 2 if network.backend == "gloo" else 1
    link_s = rounds * size / network.bytes_per_s
    return CollectiveCost(link_s + rounds * notices * network.latency_s, link_s)


def exchange_s(network: Network) -> float:
    """The time of the exchange at each step, which runs beside the step; ranks of one host use shared memory."""
    if network.hosts == 1:
        return 0.0
    return gloo_ring(EXCHANGE_BYTES, network).seconds
