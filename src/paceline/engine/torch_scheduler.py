"""A learning rate scheduler of torch, which uses a copy of the optimizer's options with rates as plain numbers.

On a GPU the optimizer's own rates are tensors. A scheduler that computes the next rate from the last one would wait for
the device, and round to fp32 there.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.config.signatures import takes_total_steps
from paceline.engine.optimizers import lrs_of
from paceline.errors import ConfigError
from paceline.observe.failures import raising_config_errors

RATES = ("params", "lr", "capturable")  # keys of a group that are not copied back to the optimizer


class TorchScheduler:
    """The scheduler that `scheduler_fn` creates for a copy of the optimizer's parameter groups."""

    def __init__(
        self, scheduler_fn: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int | None
    ) -> None:
        self._optimizer, self._copy = optimizer, _copy_of(optimizer)
        self._changed: set[str] = set()  # options besides learning rates that the scheduler sets
        self._seen = [{**group} for group in self._copy.param_groups]
        self.scheduler, self.metric = _make(scheduler_fn, self._copy, total_steps)
        self._copy._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns that the optimizer does not step
        self.takes_metric = _takes_metric(self.scheduler)
        self.copy_options()
        self.lrs()

    @property
    def changes_options(self) -> bool:
        """Whether the scheduler has set options of the optimizer besides learning rates, such as momentum."""
        return bool(self._changed)

    def lrs(self) -> list[float]:
        """The current learning rate of each group; a ConfigError if one is negative or not a number."""
        lrs = lrs_of(self._copy)
        if wrong := [lr for lr in lrs if not 0 <= lr < math.inf]:
            raise ConfigError(f"scheduler_fn set the learning rate {wrong[0]}; it must be a number ≥ 0")
        return lrs

    def step(self, *metric: float) -> None:
        """Step the scheduler once, and copy the options that it has set to the optimizer."""
        with raising_config_errors("the scheduler of scheduler_fn"):
            self.scheduler.step(*metric)
        self.copy_options()

    def copy_options(self) -> None:
        """Copy to the optimizer the options besides learning rates that the scheduler has set since the last call."""
        for own, group, seen in zip(self._optimizer.param_groups, self._copy.param_groups, self._seen, strict=True):
            for key in own.keys() & seen.keys() - set(RATES):
                if group[key] is not seen[key] and group[key] != seen[key]:
                    own[key] = seen[key] = group[key]
                    self._changed.add(key)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the scheduler's state and of the options that it sets: many compute a rate from the last one."""
        options = [
            {key: value for key, value in group.items() if key in ("lr", *self._changed) or key not in seen}
            for group, seen in zip(self._copy.param_groups, self._seen, strict=True)
        ]
        return copy.deepcopy({"scheduler": self.scheduler.state_dict(), "options": options})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler from what `state_dict` returned."""
        self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        for group, options in zip(self._copy.param_groups, state["options"], strict=True):
            group.update(options)
        self.copy_options()


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and parameters, with its own parameter groups and rates as numbers."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    lrs = zip(optimizer.param_groups, lrs_of(optimizer), strict=True)
    shadow.param_groups = [{**group, "lr": lr} for group, lr in lrs]
    return shadow


def _make(
    scheduler_fn: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int | None
) -> tuple[Any, str | None]:
    """Call `scheduler_fn` with the optimizer, and with `total_steps` if accepted; the scheduler and its metric."""
    takes_total = takes_total_steps(scheduler_fn)
    if takes_total and total_steps is None:
        raise ConfigError("scheduler_fn takes total_steps, which is unknown for an iterable data set; set max_steps")
    made = scheduler_fn(optimizer, **({"total_steps": total_steps} if takes_total else {}))
    scheduler, metric = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(scheduler, type):
        raise ConfigError(f"scheduler_fn returned the class {scheduler.__name__}; return an instance of it")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"scheduler_fn returned a {type(scheduler).__name__} of another optimizer, which would have no effect; "
            "create it for the optimizer that scheduler_fn receives"
        )
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"scheduler_fn returned a {type(scheduler).__name__}; it must return a scheduler, such as those of "
            "torch.optim.lr_scheduler"
        )
    if metric is None and getattr(scheduler, "mode", None) == "max":
        raise ConfigError(
            f'scheduler_fn returned a {type(scheduler).__name__} with mode="max", which would get val_loss, which '
            'must decrease; return it with the name of its metric, as in (scheduler, "accuracy")'
        )
    return scheduler, metric


def _takes_metric(scheduler: Any) -> bool:
    """Whether `step` needs an argument, as in ReduceLROnPlateau."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in kinds and each.default is each.empty for each in parameters)
