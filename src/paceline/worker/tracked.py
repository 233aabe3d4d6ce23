"""The objects of the user's own loop that checkpoints hold: optimizers, schedulers, further models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.state import load_optimizer, with_float_rates
from paceline.engine.optimizers import lrs_of
from paceline.errors import ConfigError
from paceline.worker.callback_states import check_plain


class Tracked:
    """The tracked objects by name, and the states that a checkpoint has for them."""

    def __init__(self, saved: Mapping[str, Any], source: Path | None, warn: Callable[[str], None]) -> None:
        """`saved` are the states in the checkpoint `source` from which the run resumes; None for a new run."""
        self.objects: dict[str, Any] = {}
        self._saved, self._source, self._warn = dict(saved), source, warn
        self._is_checked = False

    def add(self, name: str, thing: Any) -> None:
        """Track an object, and restore it from the checkpoint."""
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"run.track({name}=…) got a {type(thing).__name__}, which has no state_dict and load_state_dict; "
                "keep plain values in run.state"
            )
        if self.objects.get(name, thing) is not thing:
            raise ConfigError(f"run.track({name}=…) was called before with another object; choose another name")
        if name in self.objects:
            return
        self.objects[name] = thing
        if name in self._saved:
            self._restore(thing, self._saved.pop(name))
        elif self._source is not None:
            self._warn(f"the checkpoint has no state of {name}, which run.track names; it starts anew")

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Track an optimizer that the user has not named."""
        if any(thing is optimizer for thing in self.objects.values()):
            return
        number = 1 + len(self.optimizers())
        self.add("optimizer" if number == 1 else f"optimizer_{number}", optimizer)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers, in the order in which they were tracked."""
        return [thing for thing in self.objects.values() if isinstance(thing, torch.optim.Optimizer)]

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group of all optimizers."""
        return [lr for optimizer in self.optimizers() for lr in lrs_of(optimizer)]

    def states(self) -> dict[str, Any]:
        """The states for a checkpoint. States that no object has taken over yet are kept."""
        states = {name: _state_of(thing) for name, thing in self.objects.items()}
        if not self._is_checked:
            self._check(states)
        return {**self._saved, **states}

    def _restore(self, thing: Any, state: Any) -> None:
        if isinstance(thing, torch.optim.Optimizer):
            load_optimizer(state, thing, self._source or Path())
        else:
            thing.load_state_dict(state)

    def _check(self, states: Mapping[str, Any]) -> None:
        """After the first step: whether checkpoints can hold the states, and whether a scheduler is missing."""
        self._is_checked = True
        for name, state in states.items():
            check_plain(f"the state_dict() of {name}, which run.track names,", state)
        has_scheduler = any(hasattr(thing, "get_last_lr") for thing in self.objects.values())
        wrapped = [getattr(each.step, "_wrapped_by_lr_sched", False) for each in self.optimizers()]
        if not has_scheduler and any(wrapped):
            self._warn(
                "a scheduler of the optimizer is not tracked, so a resumed run would begin its schedule again; "
                "call run.track(scheduler=scheduler)"
            )


def _state_of(thing: Any) -> Any:
    state = thing.state_dict()
    return with_float_rates(state) if isinstance(thing, torch.optim.Optimizer) else state
