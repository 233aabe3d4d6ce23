"""Where a rank is: written by whatever moves it on, read when something goes wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The place of this rank in its run; None where it is not known yet."""

    phase: str = "starting"
    epoch: int | None = None
    step: int | None = None
    batch: int | None = None
    samples: int = 0  # trained on so far, by all ranks
    began: float = field(default_factory=time.time)  # when the run was launched

    def describe(self) -> str:
        """Such as "training, epoch 2, step 140"."""
        epoch = None if self.epoch is None else self.epoch + 1  # people count from 1
        places = (("epoch", epoch), ("step", self.step), ("batch", self.batch))
        return ", ".join([self.phase, *(f"{name} {value}" for name, value in places if value is not None)])
