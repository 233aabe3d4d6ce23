"""`RankRun`: the methods of `Run` that all loops share: sums and means over all ranks, and logs of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.callbacks.run import Run
from paceline.errors import ConfigError
from paceline.observe.events import Events
from paceline.observe.images import pixels_of, png_of
from paceline.run.layout import RunFolder
from paceline.worker.context import Context
from paceline.worker.logged_values import checked
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.sums import mean_over_ranks, rows_of_ranks, sum_over_ranks
from paceline.world import World

BINS = 64  # of a histogram


@dataclass(kw_only=True, eq=False)
class RankRun(Run):
    """The run of one rank."""

    world: World
    events: Events
    lrs: Callable[[], list[float]] = list  # of each parameter group in the last step
    is_in_callback: bool = False
    has_warned_of_image: bool = False  # since the last image that was written
    logged: dict[str, Any] = field(default_factory=dict)  # by callbacks since the last `logged` event

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the last step."""
        return self.lrs()

    def log(self, **values: Any) -> None:
        """Log numbers, images (C, H, W), and tensors of fewer dimensions as histograms; once, from rank 0."""
        numbers = {}
        for name, value in values.items():
            dimensions = getattr(value, "ndim", 0)
            if dimensions > 2:
                self._log_image(name, value)
            elif dimensions and np.prod(value.shape) != 1:
                self._log_histogram(name, value)
            else:
                numbers[name] = checked(name, value)
        if self.is_in_callback:
            self.logged |= {name: float(value) for name, value in numbers.items()}
        elif numbers:
            self._log_in_loop(numbers)

    def _log_in_loop(self, numbers: dict[str, Any]) -> None:
        self._unavailable("log")

    def _log_image(self, name: str, value: Any) -> None:
        """Write an image to a file of the run folder, and an event about it, from rank 0."""
        try:
            pixels = pixels_of(_array_of(value))
        except ValueError as error:
            raise ConfigError(f"run.log({name}=…) {error}") from None
        if not self.is_main:
            return
        path = RunFolder(self.folder).image(name, self.step_number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png_of(pixels))
        except OSError as error:
            self._warn_of_image(error)
            return
        self.has_warned_of_image = False
        self.events.write("image", step=self.step_number, name=name, file=str(path.relative_to(self.folder)))

    def _warn_of_image(self, error: OSError) -> None:
        """Write one warning for a series of images that cannot be written, as for checkpoints."""
        if not self.has_warned_of_image:
            self.has_warned_of_image = True
            text = f"an image of step {self.step_number} could not be written: {error}; training continues without it"
            self.events.write("warning", text=text, step=self.step_number)

    def _log_histogram(self, name: str, value: Any) -> None:
        """Write an event with the distribution of the finite numbers in a tensor, from rank 0."""
        if not self.is_main:
            return
        numbers = _array_of(value).astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        counts, edges = np.histogram(numbers, BINS)
        self.events.write(
            "histogram", step=self.step_number, name=name, edges=edges.tolist(), counts=counts.tolist(),
            sum=float(numbers.sum()), sum_squares=float(np.square(numbers).sum()),
        )  # fmt: skip

    def write_logged(self) -> None:
        """Write the values that callbacks have logged since the last call as one event."""
        if self.logged:
            self.events.write("logged", step=self.step_number, values=self.logged)
            self.logged = {}

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all ranks, in rank order. All ranks."""
        return sum_over_ranks(value, self.world)

    def mean(self, value: Any, weight: float = 1) -> Any:
        """The mean of a number or tensor over all ranks, weighted by `weight`. All ranks."""
        return mean_over_ranks(value, weight, self.world)

    def gather(self, tensor: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
        """The rows of all ranks in rank order; with `with_grad`, gradients flow to the rank of each row. All ranks."""
        return rows_of_ranks(tensor, self.world, with_grad=with_grad)


def run_facts(context: Context, plan: LoopPlan, state: TrainState) -> dict[str, Any]:
    """The fields of a `RankRun` that both loops set."""
    world = context.world
    return {
        "world": world, "events": context.events, "rank": world.rank, "world_size": world.size,
        "device": world.device, "folder": context.folder.path, "total_steps": plan.total_steps,
        "step_number": state.step, "epoch": state.epoch, "epochs_done": state.epochs_done, "history": state.history,
        "frozen": frozenset(state.frozen), "asked_to_finish": state.finish_requested,
        "finish_requested": state.finish_requested if state.is_finished else None,
    }  # fmt: skip


def _array_of(value: Any) -> Any:
    """An array on the host; floats of a tensor may have a type that NumPy does not have."""
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    return np.asarray(value)
