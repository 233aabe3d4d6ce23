"""What a forward pass may change beside gradients, and copies of it to go back to.

These are the buffers of the model and of the loss, and the frozen parameters that move, such as those of a teacher that
follows the trained weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

LOOKS = 8  # the first steps and their forward passes, in which buffers are made
Place = tuple[str, str, bool]  # the path of its module, its name, and whether it is saved with the weights
LOSS = "loss_fn:"  # before the path of a module of the loss
Name = tuple[str, str]  # of a parameter: the path of its module, and its name there
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Buffers:
    """The tensors that a forward pass may change, each once. Sparse ones, which are only read, are left out."""

    def __init__(self, model: torch.nn.Module, loss: Any = None, moving: set[Name] | None = None) -> None:
        """`loss` counts if it is a module; `moving` names frozen parameters, and may grow (`adopt`)."""
        self._roots = [("", model)]
        if isinstance(loss, torch.nn.Module):
            self._roots.append((LOSS, loss))
        self.moving = moving if moving is not None else set()
        self._tables: list[tuple[Place, Any]] = []  # TorchScript has tables of its own
        self._looks = 0

    def adopt(self, moving: Iterable[Name]) -> None:
        """Count these frozen parameters, too."""
        self.moving.update(moving)
        self._looks = 0

    def live(self) -> dict[Place, torch.Tensor]:
        """The tensors by their places, which are looked up only as long as buffers are made."""
        if self._looks < LOOKS:
            self._looks += 1
            self._tables = list(self._look())
        found, seen = {}, set()
        for place, table in self._tables:
            buffer = table[place[1]] if place[1] in table else None  # noqa: SIM401 - TorchScript's have no `get`
            if buffer is not None and id(buffer) not in seen and _is_changeable(buffer):
                seen.add(id(buffer))
                found[place] = buffer
        return found

    def beyond_model(self) -> list[torch.Tensor]:
        """Those that are not buffers of the model."""
        return [each for (path, *_), each in self.live().items() if path.startswith(LOSS) or _is_weight(each)]

    def of_loss(self) -> dict[str, torch.Tensor]:
        """Those of the loss that are saved, by the names that they have there."""
        return {
            f"{path.removeprefix(LOSS)}.{name}".lstrip("."): each
            for (path, name, is_saved), each in self.live().items()
            if is_saved and path.startswith(LOSS)
        }

    def parameters(self) -> dict[Name, torch.nn.Parameter]:
        """The parameters of model and loss, each once."""
        found: dict[int, tuple[Name, torch.nn.Parameter]] = {}
        for path, module in self._modules():
            for name in module._parameters.keys():  # noqa: SIM118
                if (parameter := module._parameters[name]) is not None:
                    found.setdefault(id(parameter), ((path, name), parameter))
        return dict(found.values())

    def frozen(self) -> dict[Name, torch.nn.Parameter]:
        """The frozen parameters of model and loss, each once, whether they move or not."""
        return {
            name: parameter
            for name, parameter in self.parameters().items()
            if not parameter.requires_grad
            and type(parameter.data) is torch.Tensor
            and parameter.layout is torch.strided
        }

    def _look(self) -> Iterable[tuple[Place, Any]]:
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


class Copies:
    """Copies of buffers, in memory that is made once."""

    def __init__(self) -> None:
        self._kept: dict[Place, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, live: Mapping[Place, torch.Tensor]) -> None:
        """Copy what they hold now."""
        if live.keys() == self._kept.keys() and not self._changed(live):
            _copy((self._kept[place], tensor) for place, tensor in live.items())
        else:
            self._kept = {place: tensor.clone() for place, tensor in live.items()}

    @torch.no_grad()
    def put_back(self, live: Mapping[Place, torch.Tensor]) -> None:
        """Let them hold what was copied, in the shape that they had. Those that are new since then stay."""
        _copy(self.alike(live))
        for tensor, kept in self.reshaped(live):
            tensor.resize_(kept.shape).copy_(kept)

    def alike(self, live: Mapping[Place, torch.Tensor]) -> Pairs:
        """The buffers that have the form of their copies, with these."""
        changed = self._changed(live)
        return [(live[place], kept) for place, kept in self._kept.items() if place in live and place not in changed]

    def reshaped(self, live: Mapping[Place, torch.Tensor]) -> Pairs:
        """Those that have another form now. What is not saved is a cache, which grows as its module knows."""
        return [(live[place], self._kept[place]) for place in self._changed(live) if place[2]]

    def _changed(self, live: Mapping[Place, torch.Tensor]) -> list[Place]:
        both = (place for place in self._kept if place in live)
        return [place for place in both if _form(live[place]) != _form(self._kept[place])]


def _is_changeable(tensor: torch.Tensor) -> bool:
    is_trained = _is_weight(tensor) and tensor.requires_grad  # one that was frozen before
    return tensor.layout is torch.strided and not is_trained


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let the first of each pair hold what the second does."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_type.setdefault(source.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in by_type.values():  # one kernel for many tensors, if they are of one type
        torch._foreach_copy_(targets, sources)
