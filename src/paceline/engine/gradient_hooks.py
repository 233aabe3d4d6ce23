"""Hooks that are called with each gradient during backward, for a model without DDP.

During `run.backward` they send gradients to the other ranks; after a plain `loss.backward()` they average them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from paceline.engine.buckets import GradientSums
from paceline.engine.reduce import Reduction, sum_after_backward


class GradientHooks:
    """The hooks of all parameters of one rank. A single rank sends nothing, and only detects a plain `backward`."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction  # of a plain backward
        self._watched: dict[torch.nn.Parameter, None] = {}  # in the same order on all ranks
        self._sums: GradientSums | None = None  # the sums that are sent during backward
        self._is_inside = self._is_average_due = False
        self._arrivals: Counter[torch.nn.Parameter] = Counter()  # arrivals in a backward pass that sends nothing
        self._noted: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self.is_split = False  # whether a gradient has arrived in several parts of one backward pass
        self.has_seen_plain = False  # whether there was a plain `loss.backward()` since this was set to False

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Register hooks for the trainable ones of these parameters. All ranks, with the same parameters."""
        on_gradient = self._on_gradient if self._reduction.world.size > 1 else self._notice_plain
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = None
                parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def note_gradients(self) -> None:
        """After `run.backward`: store the versions of the gradients."""
        self._noted = {p: (id(p.grad), p.grad._version) for p in self._watched if p.grad is not None}

    def have_changed(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether the user's code has changed a gradient since `note_gradients`."""
        present = ((p, None if p.grad is None else (id(p.grad), p.grad._version)) for p in parameters)
        return any(p in self._watched and self._noted.get(p) != version for p, version in present)

    def forget_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """After an update of these parameters, whose gradients are cleared."""
        for parameter in parameters:
            self._noted.pop(parameter, None)

    def are_watched(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether any of these parameters has a hook."""
        return any(parameter in self._watched for parameter in parameters)

    @contextmanager
    def sending(self, sums: GradientSums | None) -> Iterator[None]:
        """The context of the backward pass of `run.backward`; with `sums`, gradients are sent while it runs."""
        self._is_inside, self._sums = True, sums
        self._arrivals.clear()
        try:
            yield
        finally:
            self._is_inside, self._sums = False, None

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Called by autograd after it has accumulated the gradient of a parameter. All ranks."""
        if self._sums is not None:
            self._sums.on_gradient(parameter)
        elif self._is_inside:
            self._arrivals[parameter] += 1
            self.is_split |= self._arrivals[parameter] > 1
        elif not self._is_average_due:
            self.has_seen_plain = self._is_average_due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)  # type: ignore[attr-defined]

    def _notice_plain(self, _: torch.Tensor) -> None:
        self.has_seen_plain |= not self._is_inside

    def _average(self) -> None:
        """At the end of a plain `loss.backward()`: average the gradients over the ranks, as DDP does. All ranks."""
        self._is_average_due = False
        watched = list(self._watched)
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in watched]
        is_used = [parameter.grad is not None for parameter in watched]
        averaged = sum_after_backward([mine], is_used, watched, self._reduction)
        for parameter, gradient in zip(watched, averaged, strict=True):
            parameter.grad = None if gradient is None else gradient.div_(self._reduction.world.size)
