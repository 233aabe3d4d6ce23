"""The figures of a profile, as plain numbers for JSON and for `advice.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class StepSettings:
    """The settings of a run that the time of a step depends on."""

    workers: int
    batch_size: int
    lanes: int
    threads: int
    cores: int  # available to rank 0
    ranks_here: int  # the ranks that share these cores
    backend: str
    precision: str
    has_bf16: bool  # the GPU can compute in bf16
    step_mode: str
    is_replayed: bool  # the step is a CUDA graph
    has_rows: bool  # the data set is tensors on the device
    is_tensors: bool  # the data set is made of tensors
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
    """The time of an operator in a step, without the operators that it calls, or of a GPU kernel; means over ranks."""

    name: str
    ms: float
    calls: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The times of the parts of a step. Lists have a number for each rank; times are means over `steps` steps."""

    run_dir: str
    device: str
    steps: int
    hosts: list[str]
    step_ms: list[float]
    phase_ms: dict[str, list[float]]  # of the GPU if there is one; they add up to step_ms
    data_ms: list[float]  # the time that the host waits for data
    last_in: list[float]  # the share of steps in which a rank was the one that the others waited for; CPU only
    operators: list[Operator]
    traces: list[str]
    setting: StepSettings

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.step_ms)

    def share(self, phase: str) -> float:
        """The share of a step that a phase takes, over all ranks; 0 if there is no such phase."""
        return self.share_of(self.phase_ms.get(phase, ()))

    def share_of(self, ms: Sequence[float]) -> float:
        """The share of a step, from the milliseconds of each rank."""
        total = fmean(self.step_ms)
        return fmean(ms) / total if ms and total > 0 else 0.0
