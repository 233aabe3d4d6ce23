"""What a profile has found, as plain numbers that travel and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Setting:
    """What decides how fast a step is, as it was settled for the run."""

    workers: int
    batch_size: int
    lanes: int
    threads: int
    cores: int  # of rank 0's host, as far as it may be used
    ranks_here: int  # that share them
    backend: str
    precision: str
    has_bf16: bool  # a GPU that computes in it
    step_mode: str
    is_replayed: bool  # the step is a CUDA graph
    has_rows: bool  # the data set is tensors on the device
    is_tensors: bool  # the data set offers tensors
    is_stream: bool
    is_exact: bool
    compression: str
    is_fused: bool
    could_fuse: bool
    log_every_steps: int | None
    check_replicas_every: int
    log_digests: bool


@dataclass(frozen=True)
class Operator:
    """What an operator takes of a step, without those that it calls; of a kernel on a GPU. Means over ranks."""

    name: str
    ms: float
    calls: float
    share: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes. Lists have a number for each rank; times are means over `steps` steps."""

    run_dir: str
    device: str
    steps: int
    hosts: list[str]
    step_ms: list[float]
    phase_ms: dict[str, list[float]]  # on a GPU, of the device; they add up to step_ms
    data_ms: list[float]  # that the host waits for data
    last_in: list[float]  # the share of steps in which a rank was the one that the others waited for; CPU only
    operators: list[Operator]
    traces: list[str]
    setting: Setting

    @property
    def ranks(self) -> int:
        """How many there were."""
        return len(self.step_ms)

    def share(self, phase: str) -> float:
        """What part of a step a phase takes, over all ranks; 0 if there is none of that name."""
        return self.share_of(self.phase_ms.get(phase, ()))

    def share_of(self, ms: Sequence[float]) -> float:
        """What part of a step some milliseconds of each rank are."""
        total = fmean(self.step_ms)
        return fmean(ms) / total if ms and total > 0 else 0.0
