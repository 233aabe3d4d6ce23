"""The optimizers of several phases as one: it has the groups of all, and its state dict has the usual form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ConfigError

PHASE = "phase"  # the key for the name of the phase, in a parameter group of the state dict


class JoinedOptimizers(Optimizer):
    """Optimizers by the names of their phases. Learning rates and checkpoints treat them as one optimizer."""

    def __init__(self, by_phase: Mapping[str, Optimizer]) -> None:
        # Not Optimizer's constructor, which would reject a parameter of two optimizers.
        self.by_phase = dict(by_phase)
        self.defaults: dict[str, Any] = {}
        self._collect_groups()

    def _collect_groups(self) -> None:
        self.param_groups = [group for each in self.by_phase.values() for group in each.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """The state that the optimizers keep for their parameters."""
        return {parameter: kept for each in self.by_phase.values() for parameter, kept in each.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.by_phase.values():
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Never called: each phase updates its own parameters."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimizers, with consecutive numbers for their parameters."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for phase, optimizer in self.by_phase.items():
            first = sum(len(group["params"]) for group in groups)
            own = optimizer.state_dict()
            state |= {first + index: kept for index, kept in own["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]], PHASE: phase}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        groups, first = list(state_dict["param_groups"]), 0
        for phase, optimizer in self.by_phase.items():
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            saved = [group.get(PHASE) for group in own]
            if any(name != phase for name in saved):
                raise ConfigError(
                    f"the phase {phase} is {saved[0] or 'no phase'} in the checkpoint; keep the phases and their "
                    "order, or start a new run with --resume never"
                )
            state = {index - first: kept for index, kept in state_dict["state"].items() if 0 <= index - first < count}
            plain = [{key: value for key, value in group.items() if key != PHASE} for group in own]
            shifted = [{**group, "params": [index - first for index in group["params"]]} for group in plain]
            optimizer.load_state_dict({"state": state, "param_groups": shifted})
            first += count
        self._collect_groups()
