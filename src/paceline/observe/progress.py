"""The position of a rank in its run: updated by the training loop, read by the watchdog and for error messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The position of this rank in its run; None if unknown."""

    phase: str = "starting"
    epoch: int | None = None
    step: int | None = None
    batch: int | None = None
    samples: int = 0  # trained on so far, by all ranks
    began: float = field(default_factory=time.time)  # when the run was launched

    def describe(self) -> str:
        """The position as text, such as "training, epoch 2, step 140"; epochs count from 1 here."""
        epoch = None if self.epoch is None else self.epoch + 1
        counters = (("epoch", epoch), ("step", self.step), ("batch", self.batch))
        return ", ".join([self.phase, *(f"{name} {value}" for name, value in counters if value is not None)])
