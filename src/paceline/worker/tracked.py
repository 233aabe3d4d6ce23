"""The objects of the user's own loop in checkpoints: optimizers, schedulers, further models."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from paceline.checkpoint.state import KERNEL_OPTIONS, load_optimizer, with_float_rates
from paceline.data.trees import TreePath, map_leaves
from paceline.engine.optimizers import lrs_of
from paceline.errors import ConfigError
from paceline.worker.callback_states import check_plain

OUTER = "parameters outside modules"  # a key in addition to those of an optimizer's state dict


class Tracked:
    """The tracked objects by name, and their states in a checkpoint.

    Objects that the user's code tracks before its epochs last for the run. Objects tracked within an epoch belong to
    that epoch, such as an optimizer that each epoch creates: another object may have the name in a later epoch, and a
    state is restored only if the run resumes within the epoch.
    """

    def __init__(
        self, saved: Mapping[str, Any], source: Path | None, warn: Callable[[str], None], model: torch.nn.Module,
        *, frozen: Collection[str] | None = None, epochs: Mapping[str, int] | None = None, epoch: int | None = None,
    ) -> None:  # fmt: skip
        """`saved` are the states in the checkpoint `source` from which the run resumes; None for a new run.

        `frozen` names the parameters of the model that were frozen at that time. `epochs` has the epochs of objects
        that were tracked within an epoch, and `epoch` is the epoch within which the run resumes, None between epochs.
        """
        self.objects: dict[str, Any] = {}
        self._source, self._warn, self._model, self._frozen = source, warn, model, frozen
        self.epochs: dict[str, int] = {}  # of objects that were tracked within one
        is_over = {name for name, of_object in (epochs or {}).items() if of_object != epoch}
        self._saved = {name: state for name, state in saved.items() if name not in is_over}
        # The saved options of optimizers, to be restored again before the first step; None afterwards.
        self._options: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] | None = []

    def add(self, name: str, thing: Any, epoch: int | None = None) -> Any:
        """Track an object, and restore it from the checkpoint; returns the replaced object of an earlier epoch."""
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"run.track({name}=…) got a {type(thing).__name__}, which has no state_dict and load_state_dict; "
                "store plain values in run.state"
            )
        known = self.objects.get(name)
        if known is thing:
            return None
        if known is not None and (name not in self.epochs or epoch in (None, self.epochs[name])):
            raise ConfigError(f"run.track({name}=…) was called before with another object; choose another name")
        self.objects[name] = thing
        if epoch is not None:
            self.epochs[name] = epoch
        if name in self._saved:
            self._restore(name, thing, self._saved.pop(name))
        elif self._source is not None and known is None and epoch is None:
            self._warn(f"the checkpoint has no state of {name}, passed to run.track; it keeps its current state")
        return known

    def check_has(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """Reject an optimizer that would not be part of checkpoints."""
        if not any(thing is optimizer for thing in self.objects.values()):
            raise ConfigError(
                f"{call} got an optimizer that is not tracked, so checkpoints would not contain it; "
                "call run.track(optimizer=optimizer) where it is created"
            )

    def check_epochs(self, epoch: int) -> None:
        """At the end of an epoch: warn about objects that were tracked within an earlier epoch and still exist."""
        for name in (name for name, of_object in self.epochs.items() if of_object < epoch):
            self._warn(
                f"run.track({name}=…) was called within an epoch, so a run restores {name} only if it resumes within "
                "that epoch; create and track objects that last longer before run.epochs(…)"
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
        """The states for a checkpoint. States whose object has not been tracked yet are kept."""
        states = {name: self._state_of(thing) for name, thing in self.objects.items()}
        for name, state in states.items():
            check_plain(f"the state_dict() of {name}, passed to run.track,", map_leaves(state, _without_tensors))
        self._check_schedulers()
        return {**self._saved, **states}

    def digests(self) -> dict[str, int]:
        """A number for the state of each object that is neither a module nor an optimizer, whose ranks are compared."""
        digests = {}
        for name, thing in self.objects.items():
            if not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
                buffer = io.BytesIO()
                torch.save(self._state_of(thing), buffer)
                digests[name] = crc32(buffer.getvalue())
        return digests

    def restore_options(self) -> None:
        """Before the first epoch: restore options that the user's code before the loop has overwritten.

        A scheduler sets its first rate when it is created, and layers may be frozen that were unfrozen later.
        """
        self._restore_rates()
        if self._frozen is not None:
            for name, parameter in self._model.named_parameters():
                parameter.requires_grad_(name not in self._frozen)
            self._frozen = None

    def release_options(self) -> None:
        """After the first step: options that the user's code sets from now on are kept."""
        self._options = None

    def _restore_rates(self) -> None:
        for optimizer, groups in self._options or ():
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                rate = group["lr"]
                group.update({key: value for key, value in saved.items() if key not in ("params", *KERNEL_OPTIONS)})
                if isinstance(rate, torch.Tensor):
                    group["lr"] = torch.full_like(rate, group["lr"])

    def frozen(self) -> list[str]:
        """The names of the frozen parameters of the model, for a checkpoint."""
        return [name for name, parameter in self._model.named_parameters() if not parameter.requires_grad]

    def _state_of(self, thing: Any) -> Any:
        state = thing.state_dict()
        if isinstance(thing, torch.nn.Module):
            return state
        if not isinstance(thing, torch.optim.Optimizer):
            return map_leaves(state, _plain_number)
        return {**with_float_rates(state), OUTER: self._outer_parameters(thing)}

    def _outer_parameters(self, optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
        """The parameters of an optimizer that are in no tracked module, such as weights of a loss, by position."""
        known = {id(parameter) for module in (self._model, *self.modules()) for parameter in module.parameters()}
        numbered = enumerate(_parameters_of(optimizer))
        return {place: parameter.detach() for place, parameter in numbered if id(parameter) not in known}

    def _restore(self, name: str, thing: Any, state: Any) -> None:
        if not isinstance(thing, torch.optim.Optimizer):
            thing.load_state_dict(state)
            self._restore_rates()  # the constructor of a scheduler has changed them
            return
        state, outer = {**state}, state.get(OUTER, {})
        state.pop(OUTER, None)
        self._check_fits(name, thing, state["param_groups"])
        if self._options is not None:
            self._options.append((thing, [{**group} for group in state["param_groups"]]))
        load_optimizer(state, thing, self._source or Path(), has_free_options=True)
        thing._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns about schedulers that step before it
        own = _parameters_of(thing)
        with torch.no_grad():
            for place, value in outer.items():
                own[place].copy_(value)

    def _check_fits(self, name: str, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
        """Reject an optimizer of another kind, or with other groups, than the optimizer in the checkpoint."""
        if len(saved) != len(optimizer.param_groups):
            raise ConfigError(
                f"run.track({name}=…) got an optimizer with {len(optimizer.param_groups)} parameter groups, but the "
                f"checkpoint has {len(saved)}; create all groups before run.track, or start a new run with "
                "--resume never"
            )
        missing = sorted(optimizer.defaults.keys() - saved[0].keys())
        if missing:
            raise ConfigError(
                f"run.track({name}=…) got an optimizer of the class {type(optimizer).__name__}, but the checkpoint has "
                f"another one, without {', '.join(missing)}; use that one, or start a new run with --resume never"
            )

    def _check_schedulers(self) -> None:
        """Warn about a scheduler that is not tracked."""
        has_scheduler = any(hasattr(thing, "get_last_lr") for thing in self.objects.values())
        wrapped = [getattr(each.step, "_wrapped_by_lr_sched", False) for each in self.optimizers()]
        if not has_scheduler and any(wrapped):
            self._warn(
                "a scheduler of the optimizer is not tracked, so a resumed run would restart its schedule; "
                "call run.track(scheduler=scheduler)"
            )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain_number(_: TreePath, leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def _without_tensors(_: TreePath, leaf: Any) -> Any:
    return None if isinstance(leaf, torch.Tensor) else leaf
