"""`Run`: the interface of a run for callbacks and the user's own loop, implemented by `worker/rank_run.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, eq=False)
class Run:
    """A run on one rank. Everything but `rank` and `device` is equal on all ranks.

    Methods marked "All ranks" must be called by every rank, in the same order.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path
    model: torch.nn.Module  # without DDP's wrapper
    total_steps: int | None  # None for an iterable data set
    step_number: int = 0  # updates completed
    epoch: int = 0  # from 1; 0 before the first step
    epochs_done: int = 0  # epochs completed
    history: list[dict[str, Any]] = field(default_factory=list)  # one row for each epoch
    is_own_loop: bool = False  # whether the loop is the user's train_fn, whose epochs may have no evaluation
    state: dict[str, Any] = field(default_factory=dict)  # plain values of the user's own loop; in every checkpoint
    stop_requested: str | None = (
        None  # the reason why all ranks stop after this step: `stop`, a signal or the time limit
    )
    finish_requested: str | None = None  # the reason given to `finish`, once all ranks have agreed to end the run
    # Requests made on this rank only; the loop shares them with the other ranks.
    save_requested: bool = False
    asked_to_stop: str | None = None
    asked_to_finish: str | None = None
    frozen: frozenset[str] = frozenset()  # the names of parameters that were frozen by `freeze`

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def save(self) -> None:
        """Request a checkpoint: of this step in `on_evaluate` and after an epoch, of the next step elsewhere."""
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Request all ranks to save and stop after the next step; the run is not complete and can be resumed."""
        self.asked_to_stop = _reason("stop", reason)

    def finish(self, reason: str) -> None:
        """End the run as complete: after this step in `on_evaluate` and after an epoch, else after the next step."""
        self.asked_to_finish = _reason("finish", reason)

    def freeze(self, *names: str) -> None:
        """Keep parameters unchanged from the next step on; a name is that of a parameter or of a module around it."""
        self.frozen |= self._parameters_in(names)

    def unfreeze(self, *names: str) -> None:
        """Train parameters that were frozen by `freeze`, from the next step on."""
        self.frozen -= self._parameters_in(names)

    def _parameters_in(self, names: Sequence[str]) -> set[str]:
        """The names of the parameters that have one of these names, or are in a module that has one."""
        known, found = [name for name, _ in self.model.named_parameters()], set()
        for name in names:
            inside = [each for each in known if f"{each}.".startswith(f"{name}.")]
            if not inside:
                modules = ", ".join(name for name, _ in self.model.named_children())
                raise ConfigError(f"run.freeze({name!r}) matches no parameter of the model; its modules are {modules}")
            found.update(inside)
        return found

    def print(self, *values: Any) -> None:
        """Print once, from rank 0."""
        if self.is_main:
            print(*values, flush=True)

    # --- numbers over all ranks --------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all ranks, in rank order. All ranks."""
        self._unavailable("sum")

    def mean(self, value: Any, weight: float = 1) -> Any:
        """The mean of a number or tensor over all ranks, weighted by `weight`. All ranks."""
        self._unavailable("mean")

    def gather(self, tensor: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
        """The rows of all ranks in rank order; with `with_grad`, gradients flow to the rank of each row. All ranks."""
        self._unavailable("gather")

    # --- the user's own loop -----------------------------------------------------------------------------------

    def track(self, *unnamed: Any, **objects: Any) -> None:
        """Save objects with a `state_dict` in every checkpoint, and restore them if the run resumes. All ranks."""
        self._unavailable("track")

    def epochs(self, number: int) -> Iterator[int]:
        """The remaining epochs, counted from 0; a resumed run starts at its current epoch. All ranks."""
        self._unavailable("epochs")

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass in the precision of the config."""
        self._unavailable("autocast")

    def backward(self, loss: Any) -> None:
        """Compute gradients of the mean loss of a batch, or of `paceline.Sum(total, count)`. All ranks."""
        self._unavailable("backward")

    def step(
        self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None, clip_value: float | None = None
    ) -> bool:
        """On the last batch of a step: sum the gradients over lanes and ranks, update the weights, clear the gradients.

        Returns whether the step is complete. All ranks.
        """
        self._unavailable("step")

    def log(self, **values: Any) -> None:
        """Log numbers, images (C, H, W), and tensors of one or two dimensions as histograms; once, from rank 0.

        Within a batch of the user's own loop, numbers are averaged over lanes and ranks; after an epoch they are its
        metrics; in a callback they are logged as they are.
        """
        self._unavailable("log")

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the last step.

        In the user's own loop it is the current one: that of the next step after a scheduler has stepped.
        """
        self._unavailable("learning_rates")

    def ema_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights (`ema` in the config), for evaluation."""
        self._unavailable("ema_weights")

    def _unavailable(self, name: str) -> NoReturn:
        raise ConfigError(f"run.{name} works only in a train_fn with the parameter run")


def _reason(method: str, reason: str) -> str:
    """The reason given to a method; a ConfigError if it is not a text."""
    if not isinstance(reason, str) or not reason:
        raise ConfigError(f"run.{method}({reason!r}) needs a reason; pass a string that explains why the run ends")
    return reason


_current: list[Run] = []


def current_run() -> Run:
    """The run that this process trains, for code that is called by the user's loop."""
    if not _current:
        raise ConfigError("paceline.current_run() works only while a rank trains")
    return _current[-1]


def set_current_run(run: Run | None) -> None:
    """Set what `current_run` returns."""
    _current[:] = [] if run is None else [run]
