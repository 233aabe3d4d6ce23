"""`OwnRun`: the `run` of the user's own loop. Its methods are the interface; loop and step do the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.engine.precision import autocast
from paceline.errors import ConfigError
from paceline.worker.cycle import Place
from paceline.worker.rank_run import RankRun

if TYPE_CHECKING:
    from paceline.worker.own_loop import OwnLoop


@dataclass(kw_only=True, eq=False)
class OwnRun(RankRun):
    """The `Run` of the user's own loop."""

    is_own_loop: bool = True
    loop: OwnLoop = field(init=False)  # set when it is built

    def track(self, *unnamed: Any, **objects: Any) -> None:
        """Save objects with a `state_dict` in every checkpoint, and restore them if the run resumes. All ranks."""
        if unnamed:
            kind = type(unnamed[0]).__name__
            raise ConfigError(f"run.track({kind}) needs a name for it in checkpoints; write run.track({_name(kind)}=…)")
        for name, thing in objects.items():
            self.loop.track(name, thing)
            if isinstance(thing, torch.nn.Module):
                self.loop.step.include(name, thing)

    def epochs(self, number: int) -> Iterator[int]:
        """The remaining epochs, counted from 0; a resumed run starts at its current epoch. All ranks."""
        return self.loop.epochs(number)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass in the precision of the config."""
        return autocast(self.loop.step.settings.precision, self.device)

    def backward(self, loss: Any) -> None:
        """Compute gradients of the mean loss of a batch, or of `paceline.Sum(total, count)`. All ranks."""
        self.loop.check_stopped()
        self.loop.begin_exchange()
        self.loop.step.backward(loss)

    def step(
        self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None, clip_value: float | None = None
    ) -> bool:
        """On the last batch of a step: sum the gradients over lanes and ranks, update the weights, clear the gradients.

        Returns whether the step is complete. All ranks.
        """
        loop = self.loop
        loop.check_stopped()
        loop.check_tracked(optimizer, "run.step(optimizer)")
        clip_norm = loop.step.settings.clip_norm if clip_norm is None else clip_norm
        is_complete = loop.step.step(optimizer, clip_norm, clip_value)
        if is_complete:
            self.step_number = loop.state.step + 1
        return is_complete

    def freeze(self, *names: str) -> None:
        """Leave parameters unchanged from the next backward pass on."""
        super().freeze(*names)
        self._set_requires_grad(names)

    def unfreeze(self, *names: str) -> None:
        """Train parameters that were frozen by `freeze`, from the next backward pass on."""
        super().unfreeze(*names)
        self._set_requires_grad(names)

    def _set_requires_grad(self, names: tuple[str, ...]) -> None:
        named = self._parameters_in(names)
        for name, parameter in self.model.named_parameters():
            if name in named:
                parameter.requires_grad_(name not in self.frozen)
        self.loop.step.watch_again()

    def _log_in_loop(self, numbers: dict[str, Any]) -> None:
        """Log numbers: in a batch, their means over lanes and ranks; after an epoch, as metrics of the epoch."""
        self.loop.log(numbers)

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all ranks, in rank order. All ranks."""
        self.loop.meet(Place.SUM)
        return super().sum(value)

    def mean(self, value: Any, weight: float = 1) -> Any:
        """The mean of a number or tensor over all ranks, weighted by `weight`. All ranks."""
        self.loop.meet(Place.SUM)
        return super().mean(value, weight)

    def gather(self, tensor: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
        """The rows of all ranks in rank order; with `with_grad`, gradients flow to the rank of each row. All ranks."""
        self.loop.meet(Place.GATHER)
        if with_grad:
            self.loop.warn_of_gather()
        return super().gather(tensor, with_grad=with_grad)

    def ema_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights (`ema` in the config), for evaluation."""
        if self.loop.step.ema is None:
            raise ConfigError("run.ema_weights() needs averaged weights; set ema, for example ema: 0.999")
        return self.loop.step.ema.applied()


def _name(kind: str) -> str:
    """A usual name for an object of this type."""
    is_optimizer = hasattr(torch.optim, kind)
    return "optimizer" if is_optimizer else "scheduler" if hasattr(torch.optim.lr_scheduler, kind) else "name"
