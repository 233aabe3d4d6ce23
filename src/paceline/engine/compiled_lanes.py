"""An objective that is compiled for some lanes: those with a full batch of one form, on any rank.

Compiled and eager code round differently, so which lanes are compiled must not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.lanes import Lane
from paceline.data.trees import leaves_in
from paceline.engine.objective import Objective
from paceline.errors import ConfigError

OTHER_FORM = "batches of another shape than those of the first step ({form}) run eagerly, because they are not compiled"

Report = Callable[[str], None]


class CompiledObjective:
    """An objective in two forms: compiled for full batches of one form, eager for all others."""

    def __init__(self, objective: Objective, form: str, settings: Settings, report: Report) -> None:
        self._eager, self._form, self._report = objective, form, report
        self._batch_size, self._is_reported = settings.batch_size, False
        self._compiled = objective.compiled(pads_products=settings.exact)

    def for_lane(self, lane: Lane, batch: Any) -> Objective:
        """The objective that computes this lane, on whichever rank it is."""
        if len(lane.indices) != self._batch_size:
            return self._eager
        if form_of(batch) == self._form:
            return self._compiled
        if not self._is_reported:
            self._is_reported = True
            self._report(OTHER_FORM.format(form=self._form))
        return self._eager


def form_of(batch: Any) -> str:
    """The names, types and shapes of the tensors of a batch, as text that a checkpoint can hold."""
    named = [(".".join(map(str, path)), leaf) for path, leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor)]
    return ", ".join(
        f"{name or 'batch'}: {str(leaf.dtype).removeprefix('torch.')} {'×'.join(map(str, leaf.shape))}"
        for name, leaf in named
    )


@contextmanager
def explaining_compiler() -> Iterator[None]:
    """Replace an error of the compiler itself by a ConfigError; errors of the code that it compiles are not changed."""
    try:
        yield
    except Exception as error:
        from torch._dynamo import exc  # every optimizer has loaded it

        if not isinstance(
            error, (exc.BackendCompilerFailed, exc.InternalTorchDynamoError, exc.FailOnRecompileLimitHit)
        ):
            raise
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ConfigError(f"the step cannot be compiled ({reason}); use step_mode: eager") from error
