"""State besides gradients that a loss or a step changes, found by calling it twice on a copy of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.seeding import seed_generators
from paceline.data.trees import map_tensors, tensors_in
from paceline.engine.digest import digest_of
from paceline.engine.forward_state import ForwardState, LateBuffers, ParameterKey, Snapshot
from paceline.engine.losses import problem_with_loss, sum_and_count
from paceline.engine.objective import Objective, loss_in, parts_of, run_model
from paceline.engine.outer_state import outer_state

COPY_SHARE = 0.1  # the most of the free memory that a copy of outputs takes
TOLERANCE = 1e-4  # between two values of a loss, where kernels may add in any order
HIDDEN_IN_LOSS = (
    "loss_fn gives another value when it is called again with the same output and target: it keeps state that "
    "is neither separate for each lane nor saved; make it a torch.nn.Module and the state a buffer of it"
)
HIDDEN_IN_STEP = (
    "{key} gives another value when it is called again with the same weights and batch: it keeps state that is neither "
    "separate for each lane nor saved; make the state a buffer of the model, or of a torch.nn.Module that step_fn calls"
)
CHANGES_WEIGHTS = "{key} changes {name}, which is trained; do that in a callback's on_step"


class StepProbe:
    """Calls the objectives of a run on a copy of its model."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        # Functions cannot be copied, so the modules that a function refers to are those of the run.
        self._outer = ForwardState(torch.nn.Module(), outer_state(settings))
        self._state = ForwardState(model, outer_state(settings))
        self._frozen = self._state.frozen()
        self._before = {name: state_of(parameter) for name, parameter in self._frozen.items()}
        self._late = LateBuffers(self._state)
        self._kept = Snapshot()
        self._outer.add_moving(self._outer.frozen())
        self._kept.take(self._outer.tensors())

    def moving(self) -> list[ParameterKey]:
        """The frozen parameters that have changed."""
        return [name for name, parameter in self._frozen.items() if state_of(parameter) != self._before[name]]

    def restore_outer(self) -> None:
        """Restore what the calls have changed outside the copy of the model."""
        self._kept.restore(self._outer.tensors())

    def run(self, objective: Objective, batch: Any) -> str | None:
        """Call an objective; return why it cannot have lanes, or None if no reason was found."""
        return self._run(objective, _clone(batch)) or self._problem_with_late_buffers(objective, batch)

    def _problem_with_late_buffers(self, objective: Objective, batch: Any) -> str | None:
        """Why buffers that the first forward pass has created cannot be separate for each lane, if they cannot."""
        self._late.check()
        if self._late.is_done or self.settings.lanes == 1:
            return None
        seed_generators(self.settings.seed, "probe")
        if objective.takes_model:
            objective(self.model, _clone(batch))
        else:
            run_model(self.model, _clone(batch), with_labels=objective.is_models_own)
        return self._late.check()

    def _run(self, objective: Objective, batch: Any) -> str | None:
        seed_generators(self.settings.seed, "probe")
        if objective.takes_model:
            return self._run_step(objective, batch)
        if objective.is_models_own:
            loss_in(run_model(self.model, batch, with_labels=True)[0])
            return None
        return self._run_loss(objective, batch)

    def _run_loss(self, objective: Objective, batch: Any) -> str | None:
        given: Any = run_model(self.model, batch)
        # A loss may write to its arguments. Where outputs are much of the memory, their copy waits on the host, which
        # may take seconds.
        device = next(self.model.parameters()).device
        kept = _clone(given, device if _has_room(given, device) else torch.device("cpu"))
        holder = ForwardState(torch.nn.Module(), objective.function)
        before, values = Snapshot(), []
        before.take(holder.tensors())
        for is_last in (False, True):
            before.restore(holder.tensors())
            seed_generators(self.settings.seed, "probe")
            value = objective.function(*given)
            values.append(_numbers(value, objective.source))
            given = None if is_last else _clone(kept, device)
        return _problem_with(value, objective) or (None if self._are_equal(*values) else HIDDEN_IN_LOSS)

    def _run_step(self, objective: Objective, batch: Any) -> str | None:
        before, values = Snapshot(), []
        before.take(self._state.tensors())
        weights = {name: state_of(p) for name, p in self.model.named_parameters() if p.requires_grad}
        for _ in range(2):
            before.restore(self._state.tensors())
            seed_generators(self.settings.seed, "probe")
            value = objective(self.model, _clone(batch))
            values.append(_numbers(value, objective.source))
            if self.moving():  # a second call would start from other weights
                break
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                return f"{objective.key} calls backward; return the loss, which is weighted and summed over all lanes"
            if name in weights and state_of(parameter) != weights[name]:
                return CHANGES_WEIGHTS.format(key=objective.key, name=name)
        if problem := _problem_with(value, objective):
            return problem
        return None if self._are_equal(values[0], values[-1]) else HIDDEN_IN_STEP.format(key=objective.key)

    def _are_equal(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        near = 0.0 if self.settings.exact else TOLERANCE
        return len(first) == len(second) and all(
            torch.allclose(*pair, rtol=near, atol=near, equal_nan=True) for pair in zip(first, second, strict=True)
        )


def state_of(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Digest, version and address, which differ after a write; one to `.data` does not increase the version."""
    return int(digest_of(parameter)), parameter._version, parameter.data_ptr()


def _problem_with(value: Any, objective: Objective) -> str | None:
    """The reason why the loss in this value of an objective cannot be trained with; None if it can."""
    loss, _ = parts_of(value, objective.source)
    sum_and_count(loss, 1, objective.source)  # refuses what is not a number
    return problem_with_loss(loss, objective.source)


def _numbers(value: Any, source: str) -> list[torch.Tensor]:
    """The numbers in the value of an objective."""
    loss, further = parts_of(value, source)
    listed = [each for part in (loss, *further.values()) for each in _as_list(part) if each is not None]
    return [torch.as_tensor(number).detach().double() for number in listed]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _has_room(tree: Any, device: torch.device) -> bool:
    """Whether a copy of these tensors takes a small part of the free memory of their device."""
    if device.type != "cuda":
        return True
    needed = sum(tensor.nbytes for tensor in tensors_in(tree))
    return needed <= COPY_SHARE * torch.cuda.mem_get_info(device)[0]


def _clone(tree: Any, device: torch.device | None = None) -> Any:
    """A copy, because a loss may write to its arguments; parameters and a library's own mappings are not copied."""
    if isinstance(tree, Mapping) and type(tree) is not dict:
        return tree
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_clone(each, device) for each in tree)
    return map_tensors(
        tree, lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) else tensor.to(device, copy=True)
    )
