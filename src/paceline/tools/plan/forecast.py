"""What a run would take on given numbers of ranks: time, efficiency, price and memory (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.batches import steps_per_epoch
from paceline.tools.plan.collectives import Network
from paceline.tools.plan.facts import Measured, RunKeys
from paceline.tools.plan.links import Link
from paceline.tools.plan.model import lanes_here, step_time, uses_integers

ASSUMED_LOOPBACK = Link(2e9, 100e-6)  # between two ranks of a host, where it was not measured


@dataclass(frozen=True)
class Terms:
    """What the user asks for: the link between hosts, ranks per host, the price of a rank for an hour, the deadline."""

    link: Link
    per_host: int
    price: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Forecast:
    """One number of ranks."""

    ranks: int
    hosts: int
    lanes: int
    lanes_per_rank: int
    step_ms: float
    efficiency: float  # samples per second and rank, relative to a single rank
    samples_per_s: float
    steps: int | None
    seconds: float | None  # to the end of the run; None if its end is unknown
    price: float | None
    memory_bytes: int  # of a rank
    fits: bool
    is_in_time: bool | None
    limit: str  # compute, loader, network or latency
    shares: dict[str, float]  # of a step


def network_of(measured: Measured, terms: Terms, ranks: int) -> Network:
    """The network of this number of ranks."""
    local = Link(measured.loopback_bytes_per_s, measured.loopback_latency_s)
    return Network(
        ranks, terms.per_host, terms.link, local if local.bytes_per_s else ASSUMED_LOOPBACK, measured.backend
    )


def forecast(measured: Measured, keys: RunKeys, terms: Terms, ranks: int) -> Forecast:
    """The forecast for one number of ranks."""
    time = step_time(measured, keys, network_of(measured, terms, ranks))
    lanes = keys.lanes_on(ranks)
    rate = lanes * keys.batch_size / time.seconds
    alone = step_time(measured, keys, network_of(measured, terms, 1)).seconds
    steps = steps_of(keys, lanes)
    seconds = None if steps is None else steps * time.seconds + evaluation_s(measured, keys, ranks, steps)
    memory = memory_of(measured, keys, ranks)
    here = min(ranks, terms.per_host) if measured.device == "cpu" else 1
    parts = (time.compute_s, time.loader_s, time.network_s, time.latency_s)
    return Forecast(
        ranks=ranks,
        hosts=-(-ranks // terms.per_host),
        lanes=lanes,
        lanes_per_rank=lanes_here(keys, ranks),
        step_ms=1e3 * time.seconds,
        efficiency=rate / ranks / (keys.lanes_on(1) * keys.batch_size / alone),
        samples_per_s=rate,
        steps=steps,
        seconds=seconds,
        price=None if seconds is None or terms.price is None else terms.price * ranks * seconds / 3600,
        memory_bytes=memory,
        fits=here * memory <= measured.capacity_bytes,
        is_in_time=None if seconds is None or terms.deadline_s is None else seconds <= terms.deadline_s,
        limit=time.limit,
        shares={
            name: part / time.seconds
            for name, part in zip(("compute", "loader", "network", "latency"), parts, strict=True)
        },
    )


def possible_ranks(wanted: Sequence[int], keys: RunKeys) -> list[int]:
    """The numbers of ranks for which there are lanes."""
    return [ranks for ranks in wanted if keys.lanes is None or ranks <= keys.lanes]


def steps_of(keys: RunKeys, lanes: int) -> int | None:
    """The steps of the whole run."""
    if keys.samples is None:
        return keys.max_steps
    steps = steps_per_epoch(keys.samples, keys.batch_size, lanes) * keys.num_epochs
    return min(steps, keys.max_steps or steps)


def evaluation_s(measured: Measured, keys: RunKeys, ranks: int, steps: int) -> float:
    """The seconds of all evaluations, whose batches the ranks share."""
    if keys.evaluate_every_steps is not None:
        count = steps // keys.evaluate_every_steps
    else:
        count = -(-keys.num_epochs // keys.evaluate_every_epochs)
    batches = -(-keys.val_samples // keys.batch_size)
    return count * -(-batches // ranks) * measured.forward_ms / 1e3


def memory_of(measured: Measured, keys: RunKeys, ranks: int) -> int:
    """The bytes of a rank: the measured ones with other copies of the gradients, and a part of the optimizer."""
    here = lanes_here(keys, ranks)
    is_rounded = uses_integers(keys, ranks)
    copies = here if is_rounded else min(here, 2)
    scratch = 4 * min(keys.bucket_mb * 2**20, measured.gradient_bytes) if is_rounded else 0
    spared = measured.optimizer_bytes * (1 - 1 / ranks) if keys.shards_optimizer else 0
    return int(measured.memory_bytes + (copies - 2) * measured.gradient_bytes + scratch - spared)
