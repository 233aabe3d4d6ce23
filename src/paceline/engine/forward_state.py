"""The tensors, besides gradients, that a forward pass may change, and copies of them to restore.

These are the buffers of the model and of the loss, and the frozen parameters that change, such as those of a teacher
that follows the trained weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.engine.digest import digest_of

LATE = (
    "the model creates {name} in its first forward pass and changes it in later ones, so the lanes of a step would "
    "begin with different values; register it in __init__ with its first value"
)
SCANS = 8  # calls that search the modules again: some create their buffers in the first forward passes
BufferKey = tuple[str, str, bool]  # the path of the module, the name in it, and whether it is saved with the weights
LOSS_PREFIX = "loss_fn:"  # before the path of a module of the loss
ParameterKey = tuple[str, str]  # the path of the module, and the name of the parameter in it
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class ForwardState:
    """The tensors that a forward pass may change, each once. Excludes sparse tensors, which are only read."""

    def __init__(self, model: torch.nn.Module, loss: Any = None, moving: set[ParameterKey] | None = None) -> None:
        """`loss` is included if it is a module; `moving` names frozen parameters, and may grow (`add_moving`)."""
        self._roots = [("", model)]
        if isinstance(loss, torch.nn.Module):
            self._roots.append((LOSS_PREFIX, loss))
        self.moving = moving if moving is not None else set()
        self._tables: list[tuple[BufferKey, Any]] = []  # the dict of its module; TorchScript has its own type
        self._scans = 0

    def include(self, name: str, module: torch.nn.Module) -> None:
        """Include the buffers of a further module."""
        self._roots.append((f"{name}:", module))
        self._scans = 0

    def add_moving(self, moving: Iterable[ParameterKey]) -> None:
        """Include these frozen parameters."""
        self.set_moving({*self.moving, *moving})

    def set_moving(self, moving: Iterable[ParameterKey]) -> None:
        """Include exactly these frozen parameters."""
        moving = set(moving)
        self.moving.clear()
        self.moving.update(moving)
        self._scans = 0

    def tensors(self) -> dict[BufferKey, torch.Tensor]:
        """The current tensors. Only the first calls search all modules."""
        if self._scans < SCANS:
            self._scans += 1
            self._tables = list(self._scan())
        found, seen = {}, set()
        for key, table in self._tables:
            buffer = table[key[1]] if key[1] in table else None  # noqa: SIM401 - TorchScript's have no `get`
            if buffer is not None and id(buffer) not in seen and _is_changeable(buffer):
                seen.add(id(buffer))
                found[key] = buffer
        return found

    def beyond_model(self) -> list[torch.Tensor]:
        """The tensors that are not buffers of the model."""
        return [each for (path, *_), each in self.tensors().items() if path.startswith(LOSS_PREFIX) or _is_weight(each)]

    def of_loss(self) -> dict[str, torch.Tensor]:
        """The tensors of the loss that are saved, by their names in the loss."""
        return {
            f"{path.removeprefix(LOSS_PREFIX)}.{name}".lstrip("."): each
            for (path, name, is_saved), each in self.tensors().items()
            if is_saved and path.startswith(LOSS_PREFIX)
        }

    def parameters(self) -> dict[ParameterKey, torch.nn.Parameter]:
        """The parameters of model and loss, each once."""
        found: dict[int, tuple[ParameterKey, torch.nn.Parameter]] = {}
        for path, module in self._modules():
            for name in module._parameters.keys():  # noqa: SIM118
                if (parameter := module._parameters[name]) is not None:
                    found.setdefault(id(parameter), ((path, name), parameter))
        return dict(found.values())

    def frozen(self) -> dict[ParameterKey, torch.nn.Parameter]:
        """The frozen parameters of model and loss, each once, whether they change or not."""
        return {
            key: parameter
            for key, parameter in self.parameters().items()
            if not parameter.requires_grad
            and type(parameter.data) is torch.Tensor
            and parameter.layout is torch.strided
        }

    def _scan(self) -> Iterable[tuple[BufferKey, Any]]:
        for path, module in self._modules():
            table, not_saved = module._buffers, getattr(module, "_non_persistent_buffers_set", ())
            for name in table.keys():  # noqa: SIM118
                yield (path, name, name not in not_saved), table
            for name in module._parameters.keys():  # noqa: SIM118
                if (path, name) in self.moving:
                    yield (path, name, True), module._parameters

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for prefix, root in self._roots:
            for path, module in root.named_modules():
                yield prefix + path, module


class Snapshot:
    """Copies of the tensors of a `ForwardState`, in memory that is allocated once."""

    def __init__(self) -> None:
        self._copies: dict[BufferKey, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[BufferKey, torch.Tensor]) -> None:
        """Copy the current values."""
        if tensors.keys() == self._copies.keys() and not self._changed(tensors):
            _copy((self._copies[key], tensor) for key, tensor in tensors.items())
        else:
            self._copies = {key: tensor.clone() for key, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[BufferKey, torch.Tensor]) -> None:
        """Set the tensors to the copied values and shapes. Tensors that are new since then are not changed."""
        _copy(self.same_shape(tensors))
        for tensor, copied in self.reshaped(tensors):
            tensor.resize_(copied.shape).copy_(copied)

    def same_shape(self, tensors: Mapping[BufferKey, torch.Tensor]) -> Pairs:
        """The tensors that have the shape and dtype of their copies, each with its copy."""
        changed = self._changed(tensors)
        return [(tensors[key], copied) for key, copied in self._copies.items() if key in tensors and key not in changed]

    def changed_weights(self, tensors: Mapping[BufferKey, torch.Tensor]) -> list[BufferKey]:
        """The keys of the parameters that differ from their copies."""
        return [
            key
            for key, copied in self._copies.items()
            if key in tensors and _is_weight(tensors[key]) and not torch.equal(tensors[key], copied)
        ]

    def reshaped(self, tensors: Mapping[BufferKey, torch.Tensor]) -> Pairs:
        """The tensors whose shape or dtype has changed, each with its copy. Unsaved ones are growing caches."""
        return [(tensors[key], self._copies[key]) for key in self._changed(tensors) if key[2]]

    def _changed(self, tensors: Mapping[BufferKey, torch.Tensor]) -> list[BufferKey]:
        both = (key for key in self._copies if key in tensors)
        return [key for key in both if _form(tensors[key]) != _form(self._copies[key])]


class LaneBuffers:
    """Sets the buffers of each lane to those of the step's start, and keeps those of the first lane's end.

    The first lane is the first one of this rank. On rank 0 it is lane 0, whose buffers are sent to the other ranks. If
    it has no samples, the buffers do not change. Changes of buffers by the user's code after the update of a step are
    also kept, such as the count of a moving average.
    """

    def __init__(self, state: ForwardState, before: Snapshot | None = None) -> None:
        """`before` is a copy that others take at each step's start."""
        self._state, self._before, self._after_first = state, before or Snapshot(), Snapshot()
        self._takes = before is None

    def begin(self, lanes: int, *, keeps_first: bool) -> None:
        """Start a step with this number of lanes on this rank."""
        self._entered, self._keeps_first = 0, keeps_first
        self._is_needed = lanes > 1 or not keeps_first
        if self._takes:
            self._before.take(self._state.tensors())

    def changed_weights(self) -> list[ParameterKey]:
        """The keys of frozen parameters that have changed since the step's start."""
        return [(path, name) for path, name, _ in self._before.changed_weights(self._state.tensors())]

    def restore_start(self) -> None:
        """Set the buffers to those of the step's start, which are equal on all ranks."""
        self._before.restore(self._state.tensors())

    def enter(self) -> None:
        """Before the forward pass of a lane."""
        if self._is_needed and self._entered:
            self._before.restore(self._state.tensors())
        self._entered += 1

    def finish_early(self) -> None:
        """In the last lane, after the update: later changes of buffers do not belong to the lane, and are kept."""
        self.leave()
        self.finish()
        self._is_needed = False

    def leave(self) -> None:
        """After the last forward pass of a lane."""
        if self._is_needed and self._keeps_first and self._entered == 1:
            self._after_first.take(self._state.tensors())

    def finish(self) -> None:
        """After the last lane."""
        if self._is_needed:
            (self._after_first if self._keeps_first else self._before).restore(self._state.tensors())


class LateBuffers:
    """Finds a buffer that the first forward pass creates and the second one changes.

    The lanes of the first step would begin with different values, which depend on the number of ranks.
    """

    def __init__(self, state: ForwardState) -> None:
        """Before the first forward pass."""
        self._state, self._known = state, set(state.tensors())
        self._digests: dict[BufferKey, int] | None = None
        self.is_done = False  # whether no further forward pass needs to be observed

    def check(self) -> str | None:
        """After each of the first forward passes: why the buffers cannot be separate for each lane, if they cannot."""
        before = self._digests
        late = {key: each for key, each in self._state.tensors().items() if key not in self._known}
        self._digests = {key: int(digest_of(each)) for key, each in late.items()}
        self.is_done = before is not None or not late
        changed = (key for key, digest in (before or {}).items() if self._digests.get(key, digest) != digest)
        return next((LATE.format(name=".".join(filter(None, key[:2]))) for key in changed), None)


class EvaluationBuffers:
    """Keeps buffers while the user's own loop evaluates: all batches start with the same, restored at the end."""

    def __init__(self, state: ForwardState, lanes: LaneBuffers) -> None:
        self._state, self._lanes = state, lanes
        self._start, self._before, self._is_begun = Snapshot(), Snapshot(), False

    def begin(self, *, is_in_batch: bool) -> None:
        """Copy the buffers. Within a batch, uses those of the step's start, which are equal on all ranks."""
        self.end()
        tensors = self._state.tensors()
        self._before.take(tensors)
        if is_in_batch:
            self._lanes.restore_start()
        self._start.take(tensors)
        self._is_begun = True

    def restart(self) -> None:
        """Before a batch: restore the buffers with which the evaluation started."""
        self._start.restore(self._state.tensors())

    def end(self) -> None:
        """Restore the buffers from before the evaluation, if one has started."""
        if self._is_begun:
            self._before.restore(self._state.tensors())
        self._is_begun = False


def _is_changeable(tensor: torch.Tensor) -> bool:
    is_trained = _is_weight(tensor) and tensor.requires_grad  # was frozen before
    return tensor.layout is torch.strided and not is_trained


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_dtype.setdefault(source.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in by_dtype.values():  # one kernel for many tensors, if they have one dtype
        torch._foreach_copy_(targets, sources)
