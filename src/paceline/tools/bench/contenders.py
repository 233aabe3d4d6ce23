"""The table of the loops that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.tools.bench import libraries, loops
from paceline.tools.bench.setup import LoopSetup


@dataclass(frozen=True)
class Contender:
    """A loop, as it appears in the table."""

    title: str
    package: str  # its distribution name, for pip and `importlib.metadata`
    loop: Callable[[LoopSetup], nn.Module | None]
    starts_ranks: bool = False  # the loop starts its ranks; otherwise each rank is a process of the benchmark
    needs: tuple[str, ...] = ()  # further packages, which are not dependencies of it
    needs_one_gpu: bool = False  # otherwise it is skipped

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages that must be installed."""
        return (self.package, *self.needs)


CONTENDERS = {
    "hand-written": Contender("hand-written DDP", "torch", loops.hand_written),
    "recorded": Contender("CUDA graph by hand", "torch", loops.recorded, needs_one_gpu=True),
    "paceline": Contender("Paceline", "paceline", loops.paceline_by_default, starts_ranks=True),
    "paceline-loader": Contender(
        "Paceline, DataLoader, fp32", "paceline", loops.paceline_samplewise, starts_ranks=True
    ),
    "accelerate": Contender("Accelerate", "accelerate", libraries.accelerate),
    "fabric": Contender("Lightning Fabric", "lightning", libraries.fabric),
    "lightning": Contender("Lightning Trainer", "lightning", libraries.lightning),
    "transformers": Contender("Hugging Face Trainer", "transformers", libraries.transformers, needs=("accelerate",)),
}
