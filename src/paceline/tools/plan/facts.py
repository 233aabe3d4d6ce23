"""What a plan is computed from: the measured parts of a step, and the keys of the run that a forecast depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Gradient:
    """A gradient in the order in which backward completes them."""

    size: int  # bytes
    element_size: int
    ready_ms: float  # since backward of the lane began


@dataclass(frozen=True)
class Measured:
    """The parts of a step on this machine, with `concurrent` ranks at work. Milliseconds are means over these ranks."""

    device: str  # cpu, or the name of the GPU
    backend: str
    cores: int
    threads: int  # of an operator, on each rank
    concurrent: int
    forward_ms: float  # of a lane
    backward_ms: float  # of a lane
    update_ms: float  # the check of the gradients, clipping and the optimizer
    other_ms: float  # logs, callbacks and the rest of a step
    loader_ms: float  # to fetch the samples of a lane
    is_loader_ahead: bool  # batches are fetched by other processes while a step runs
    round_ms: float  # to round the gradients of one lane to integers and back
    round_lane_ms: float  # the same for each further lane of a rank
    gradients: tuple[Gradient, ...]
    has_overlap: bool  # gradients are summed while backward runs
    buffer_bytes: int
    optimizer_bytes: int
    memory_bytes: int  # of a rank with two lanes
    capacity_bytes: int  # of the GPU, or of this host for all of its ranks
    loopback_bytes_per_s: float  # between two ranks of this host; 0 if not measured
    loopback_latency_s: float

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients."""
        return sum(gradient.size for gradient in self.gradients)

    @property
    def has_spare_cores(self) -> bool:
        """Whether a thread that rounds gradients has a core of its own while backward runs."""
        return self.cores >= self.concurrent * (self.threads + 1)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Measured:
        """The figures from the result of `asdict`."""
        return cls(**{**content, "gradients": tuple(Gradient(**each) for each in content["gradients"])})


@dataclass(frozen=True)
class RunKeys:
    """The keys of a run and the sizes of its data."""

    batch_size: int
    lanes: int | None  # None: one for each rank
    samples: int | None  # None: an iterable data set, whose end is unknown
    val_samples: int
    num_epochs: int
    max_steps: int | None
    evaluate_every_steps: int | None
    evaluate_every_epochs: int
    is_exact: bool
    compression: str
    bucket_mb: float
    shards_optimizer: bool

    def with_(self, **changes: Any) -> RunKeys:
        """The same keys with changes."""
        return replace(self, **changes)

    def lanes_on(self, ranks: int) -> int:
        """The lanes of a step with this number of ranks."""
        return self.lanes or ranks

    @property
    def sums_halves(self) -> bool:
        """Whether gradients are sent in 16 bits."""
        return self.compression in ("bf16", "fp16")
