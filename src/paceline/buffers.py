"""The buffers of a model, which a forward pass may change, and copies of them to go back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

LOOKS = 8  # the first steps and their forward passes, in which buffers are made
Place = tuple[str, str, bool]  # the path of its module, its name, and whether it is saved with the weights
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Buffers:
    """The buffers that a model holds now, each once. Sparse ones, which nobody writes to, are left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tables: list[tuple[Place, Any]] = []  # TorchScript has tables of its own
        self._looks = 0

    def live(self) -> dict[Place, torch.Tensor]:
        """The tensors by their places, which are looked up only as long as buffers are made."""
        if self._looks < LOOKS:
            self._looks += 1
            self._tables = list(self._look())
        found, seen = {}, set()
        for place, table in self._tables:
            buffer = table[place[1]] if place[1] in table else None  # noqa: SIM401 - TorchScript's have no `get`
            if buffer is not None and id(buffer) not in seen and buffer.layout is torch.strided:
                seen.add(id(buffer))
                found[place] = buffer
        return found

    def _look(self) -> Iterable[tuple[Place, Any]]:
        for path, module in self._model.named_modules():
            table, not_saved = module._buffers, getattr(module, "_non_persistent_buffers_set", ())
            for name in table.keys():  # noqa: SIM118
                yield (path, name, name not in not_saved), table


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
