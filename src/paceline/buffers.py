"""The buffers of a model, which a forward pass may change, and copies of them to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Buffers:
    """The buffers that a model holds now, each once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._places: list[tuple[Any, str]] = []  # TorchScript has tables of its own
        self._looks = 0

    def live(self) -> list[torch.Tensor]:
        """The tensors; their places are looked up before and after the first forward, when all have been made."""
        if self._looks < 2:
            self._looks += 1
            tables = [module._buffers for module in self._model.modules()]
            self._places = [(table, name) for table in tables for name in table.keys()]  # noqa: SIM118
        found = (table[name] for table, name in self._places if name in table)
        return list({id(buffer): buffer for buffer in found if buffer is not None}.values())


class Copies:
    """Copies of tensors, in memory that is made once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, live: Sequence[torch.Tensor]) -> None:
        """Copy what they hold now."""
        if self.fit(live):
            _copy(live, self.tensors)
        else:
            self.tensors = [tensor.clone() for tensor in live]

    @torch.no_grad()
    def put_back(self, live: Sequence[torch.Tensor]) -> None:
        """Let them hold what was copied, in the shape that they had."""
        if self.fit(live):
            _copy(self.tensors, live)
            return
        # A forward pass may also have put another kind of tensor in a buffer's place.
        for tensor, kept in zip(live, self.tensors, strict=False):
            tensor.resize_(kept.shape).copy_(kept)

    def fit(self, live: Sequence[torch.Tensor]) -> bool:
        """Whether these have the shapes and types of the copies."""
        return [(each.shape, each.dtype) for each in live] == [(each.shape, each.dtype) for each in self.tensors]


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for one, other in zip(source, target, strict=True):
        sources, targets = by_type.setdefault(one.dtype, ([], []))
        sources.append(one)
        targets.append(other)
    for sources, targets in by_type.values():  # one kernel for many tensors, if they are of one type
        torch._foreach_copy_(targets, sources)
