"""The objects of the user's own loop that checkpoints hold: optimizers, schedulers, further models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.state import KERNEL_OPTIONS, load_optimizer, with_float_rates
from paceline.engine.optimizers import lrs_of
from paceline.errors import ConfigError
from paceline.worker.callback_states import check_plain

OUTER = "parameters outside modules"  # a key beside those of an optimizer's state dict


class Tracked:
    """The tracked objects by name, and the states that a checkpoint has for them."""

    def __init__(
        self, saved: Mapping[str, Any], source: Path | None, warn: Callable[[str], None], model: torch.nn.Module,
        frozen: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """`saved` are the states in the checkpoint `source` from which the run resumes; None for a new run.

        `frozen` names the parameters of the model that were frozen then.
        """
        self._frozen = frozen
        self.objects: dict[str, Any] = {}
        self._saved, self._source, self._warn, self._model = dict(saved), source, warn, model
        self._is_checked = self._is_state_checked = False
        self._first_rates: dict[str, list[float]] = {}  # of optimizers that the user has not named
        # The saved options of optimizers, to restore once more before the first epoch; None afterwards.
        self._options: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] | None = []

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
            self._warn(f"the checkpoint has no state of {name}, which run.track names; it keeps its present state")

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Track an optimizer that steps, if `track` does not name it; returns one of the same parameters it replaces.

        It is restored in its first step, which is late for what the user's code sets or uses before.
        """
        tracked_name = next((name for name, thing in self.objects.items() if thing is optimizer), None)
        if tracked_name is not None:
            self._check_rates(tracked_name, optimizer)
            return None
        for name in self._first_rates:
            if _first_of(self.objects[name]) is _first_of(optimizer):
                replaced: torch.optim.Optimizer = self.objects[name]
                self.objects[name] = optimizer
                return replaced
        number = 1 + len(self.optimizers())
        name = "optimizer" if number == 1 else f"optimizer_{number}"
        if self._outer_parameters(optimizer):
            self._warn_of_unnamed("updates parameters outside the model")
        self.add(name, optimizer)
        self._first_rates[name] = _rates_on_host(optimizer)
        return None

    def _check_rates(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Warn if the learning rate of an optimizer changes that the user has not named."""
        if name in self._first_rates and self._first_rates[name] != _rates_on_host(optimizer):
            self._warn_of_unnamed("changes its learning rate")

    def _warn_of_unnamed(self, what: str) -> None:
        self._warn(
            f"an optimizer that run.track does not name {what}; a resumed run would restore it too late; "
            "call run.track(optimizer=optimizer) before run.epochs(…)"
        )

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers, in the order in which they were tracked."""
        return [thing for thing in self.objects.values() if isinstance(thing, torch.optim.Optimizer)]

    def modules(self) -> list[torch.nn.Module]:
        """The tracked modules, besides the model."""
        return [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group of all optimizers."""
        return [lr for optimizer in self.optimizers() for lr in lrs_of(optimizer)]

    def states(self) -> dict[str, Any]:
        """The states for a checkpoint. States that no object has taken over yet are kept."""
        states = {name: self._state_of(thing) for name, thing in self.objects.items()}
        if not self._is_checked:
            self._check(states)
        return {**self._saved, **states}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise, once, if a checkpoint cannot hold `run.state`."""
        if state and not self._is_state_checked:
            self._is_state_checked = True
            check_plain("run.state", state)

    def restore_options(self) -> None:
        """Before the first epoch: restore what the user's code before the loop has set again.

        A scheduler that is made after `track` sets its first rate, and layers may be frozen that were trained since.
        """
        for optimizer, groups in self._options or ():
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                rate = group["lr"]
                group.update({key: value for key, value in saved.items() if key not in ("params", *KERNEL_OPTIONS)})
                if isinstance(rate, torch.Tensor):
                    group["lr"] = torch.full_like(rate, group["lr"])
        self._options = None
        if self._frozen is not None:
            for name, parameter in self._model.named_parameters():
                parameter.requires_grad_(name not in self._frozen)
            self._frozen = None

    def frozen(self) -> list[str]:
        """The names of the frozen parameters of the model, for a checkpoint."""
        return [name for name, parameter in self._model.named_parameters() if not parameter.requires_grad]

    def _state_of(self, thing: Any) -> Any:
        state = thing.state_dict()
        if not isinstance(thing, torch.optim.Optimizer):
            return state
        return {**with_float_rates(state), OUTER: self._outer_parameters(thing)}

    def _outer_parameters(self, optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
        """The parameters of an optimizer that are in no tracked module, such as weights of a loss, by their places."""
        known = {id(parameter) for module in (self._model, *self.modules()) for parameter in module.parameters()}
        numbered = enumerate(_parameters_of(optimizer))
        return {place: parameter.detach() for place, parameter in numbered if id(parameter) not in known}

    def _restore(self, thing: Any, state: Any) -> None:
        if not isinstance(thing, torch.optim.Optimizer):
            thing.load_state_dict(state)
            return
        state, outer = {**state}, state.get(OUTER, {})
        state.pop(OUTER, None)
        if self._options is not None:
            self._options.append((thing, [{**group} for group in state["param_groups"]]))
        load_optimizer(state, thing, self._source or Path(), has_free_options=True)
        own = _parameters_of(thing)
        with torch.no_grad():
            for place, value in outer.items():
                own[place].copy_(value)

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


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _rates_on_host(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates that can be read without waiting for a device."""
    return [group["lr"] for group in optimizer.param_groups if not isinstance(group["lr"], torch.Tensor)]


def _first_of(optimizer: torch.optim.Optimizer) -> torch.nn.Parameter:
    return _parameters_of(optimizer)[0]
