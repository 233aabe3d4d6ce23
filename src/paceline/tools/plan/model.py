"""The time of a step on any number of ranks: compute, sums of gradients beside backward, exchange and loaders (pure).

docs/plan.md explains the model and compares it with measured runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tools.plan.collectives import NOTHING, CollectiveCost, Network, all_reduce, broadcast, exchange_s
from paceline.tools.plan.facts import Gradient, Measured, RunKeys

BLOCK = 256  # elements that share an exponent
SPLIT_BYTES = 1 << 18  # Gloo sends larger sums of integers in two parts at once
QUEUES = 2  # buckets whose sums run at the same time with Gloo
LIMITS = ("compute", "loader", "network", "latency")


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that are summed together, and when the last of them is ready."""

    size: int
    element_size: int
    ready_s: float  # since backward of the lane began


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and how they are spent."""

    seconds: float
    compute_s: float  # forward, backward, rounding, update and the rest of a step
    loader_s: float  # waiting for samples
    network_s: float  # waiting for bytes that are sent
    latency_s: float  # waiting for messages on their way

    @property
    def limit(self) -> str:
        """The part that takes the most time."""
        parts = (self.compute_s, self.loader_s, self.network_s, self.latency_s)
        return LIMITS[max(range(len(parts)), key=parts.__getitem__)]


def step_time(measured: Measured, keys: RunKeys, network: Network) -> StepTime:
    """The time of a full step."""
    here = lanes_here(keys, network.ranks)
    work = _work_s(measured, keys, network)
    fetching = here * measured.loader_ms / 1e3
    loader = max(0.0, fetching - work) if measured.is_loader_ahead else fetching
    is_in_backward = network.ranks == 1 or network.shared is not None or not measured.has_spare_cores
    rounding = _rounding_s(measured, keys, network) if is_in_backward else 0.0
    update = measured.update_ms / (network.ranks if keys.shards_optimizer else 1)
    compute = (here * (measured.forward_ms + measured.backward_ms) + update + measured.other_ms) / 1e3 + rounding
    waiting = max(0.0, work - compute)
    latency = min(waiting, work - _work_s(measured, keys, network.without_latency()))
    return StepTime(work + loader, work - waiting, loader, waiting - latency, latency)


def lanes_here(keys: RunKeys, ranks: int) -> int:
    """The lanes of the ranks that have the most."""
    return -(-keys.lanes_on(ranks) // ranks)


def uses_integers(keys: RunKeys, ranks: int) -> bool:
    """Whether the gradients of lanes are rounded to integers before they are summed."""
    return keys.is_exact and keys.lanes_on(ranks) > 2


def buckets_of(gradients: Sequence[Gradient], limit: float) -> list[PlannedBucket]:
    """The buckets of DDP: in the order of backward, each closed by the gradient with which it reaches `limit` bytes."""
    found: list[PlannedBucket] = []
    size = 0
    for index, gradient in enumerate(gradients):
        size += gradient.size
        if size >= limit or index == len(gradients) - 1:
            found.append(PlannedBucket(size, gradient.element_size, gradient.ready_ms / 1e3))
            size = 0
    return found


def sum_cost(bucket: PlannedBucket, keys: RunKeys, network: Network) -> CollectiveCost:
    """The cost of summing a bucket over all ranks; before integers, the ranks agree on exponents."""
    if uses_integers(keys, network.ranks):
        parts = 2 if network.backend == "gloo" and bucket.size >= SPLIT_BYTES else 1
        return all_reduce(bucket.size / BLOCK, network) + all_reduce(bucket.size, network, parts=parts)
    halves = keys.sums_halves and bucket.element_size == 4
    return all_reduce(bucket.size / 2 if halves else bucket.size, network)


# --- the parts of a step ----------------------------------------------------------------------------------------------


def _work_s(measured: Measured, keys: RunKeys, network: Network) -> float:
    """The seconds of a step whose samples are there."""
    here = lanes_here(keys, network.ranks)
    forward, backward = measured.forward_ms / 1e3, measured.backward_ms / 1e3
    begin = broadcast(measured.buffer_bytes, network).seconds + here * forward + (here - 1) * backward
    summed = begin + _backward_s(measured, keys, network, begin)
    step = summed + _update_s(measured, keys, network) + measured.other_ms / 1e3
    return max(step, exchange_s(network))


def _backward_s(measured: Measured, keys: RunKeys, network: Network, begin: float) -> float:
    """The seconds from the start of the last lane's backward to the end of the last sum."""
    backward, rounding = measured.backward_ms / 1e3, _rounding_s(measured, keys, network)
    if network.ranks == 1:
        return backward + rounding
    buckets = buckets_of(measured.gradients, keys.bucket_mb * 2**20)
    if network.shared is not None:  # the hook returns when a bucket is summed, so backward waits for it
        return backward + rounding + sum(sum_cost(bucket, keys, network).seconds for bucket in buckets)
    queues = [0.0] * (QUEUES if network.backend == "gloo" else 1)
    stolen = link_free = 0.0
    for index, bucket in enumerate(buckets):
        ready = stolen + (bucket.ready_s if measured.has_overlap else backward)
        share = rounding * bucket.size / measured.gradient_bytes
        start = max(ready, queues[index % len(queues)]) + share
        if not measured.has_spare_cores:
            stolen += share
        cost = sum_cost(bucket, keys, network)
        queues[index % len(queues)] = max(start + cost.seconds, link_free + cost.link_s)
        link_free = max(start, link_free) + cost.link_s
    return max(backward + stolen, *queues)


def _rounding_s(measured: Measured, keys: RunKeys, network: Network) -> float:
    """The seconds in which a rank rounds the gradients of its lanes."""
    if not uses_integers(keys, network.ranks):
        return 0.0
    return (measured.round_ms + (lanes_here(keys, network.ranks) - 1) * measured.round_lane_ms) / 1e3


def _update_s(measured: Measured, keys: RunKeys, network: Network) -> float:
    """The seconds of the update; with a sharded optimizer, each rank updates its part and sends it to the others."""
    ranks = network.ranks
    if not keys.shards_optimizer or ranks == 1:
        return measured.update_ms / 1e3
    share = measured.gradient_bytes / ranks
    rounds = max(1, round(share / (keys.bucket_mb * 2**20)))
    message = broadcast(1, network) if share else NOTHING
    sent = (ranks - 1) * share / network.bytes_per_s
    return measured.update_ms / 1e3 / ranks + rounds * message.seconds + sent
