"""The calls of `run.backward` and `run.step` in a step of the user's own loop, and the checks of these calls.

Rejects calls that would give wrong gradients, or different gradients on a different number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.engine.gradient_hooks import GradientHooks
from paceline.errors import ConfigError
from paceline.formatting import ranks_text
from paceline.user_code import described


class StepCalls:
    """The calls of the current step, lane by lane."""

    def __init__(self, lanes: int, world_size: int, hooks: GradientHooks) -> None:
        self._lanes_text = f"lanes={lanes} on {ranks_text(world_size)}"
        self._has_further_lanes, self._hooks = lanes > world_size, hooks
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._calls: list[torch.optim.Optimizer | None] = []  # None for a backward
        self._lane_start = 0  # the number of calls before the current lane
        self._rates: dict[torch.optim.Optimizer, list[float]] = {}  # in the first lane
        self.has_own_count = self._hooks.has_seen_plain = False

    def enter(self) -> None:
        """Start a lane."""
        self._lane_start = len(self._calls)

    @property
    def is_begun(self) -> bool:
        """Whether there was a call in this step."""
        return bool(self._calls)

    @property
    def has_stepped(self) -> bool:
        """Whether there was a `step` in the current lane."""
        return any(call is not None for call in self._calls[self._lane_start :])

    def count_backward(self) -> int:
        """The number of `backward` calls in this step."""
        return self._calls.count(None)

    def only_optimizer(self, lanes: int) -> torch.optim.Optimizer | None:
        """The optimizer of a step that had one `backward` and one `step` for each lane; None for other steps."""
        optimizers = {call for call in self._calls if call is not None}
        is_regular = len(optimizers) == 1 and self._calls == [None, *optimizers] * lanes
        return optimizers.pop() if is_regular else None

    def backward(self, loss: Any) -> None:
        """Record a `backward`."""
        if not isinstance(loss, (torch.Tensor, tuple, list)):
            raise ConfigError(
                f"run.backward(loss) got {described(loss)}; pass a tensor that is a mean over the batch, or "
                "paceline.Sum(total, count)"
            )
        has_own_count = isinstance(loss, (tuple, list))
        if self._calls and has_own_count != self.has_own_count:
            raise ConfigError(
                "run.backward got a mean and a sum with its own count in one step; use the same form for both"
            )
        if has_own_count and None in self._calls[self._lane_start :]:
            raise ConfigError(
                "run.backward got two sums with different counts in one batch; add the losses to one sum first"
            )
        self.has_own_count = has_own_count
        self._calls.append(None)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a `step`, before it changes anything."""
        self._check_backward()
        self._check_other_steps(optimizer)
        self._check_gradients(optimizer)
        self._check_rates(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "run.step(optimizer) evaluates a batch once, but LBFGS several times; call optimizer.step(closure) "
                "with a closure that calls loss.backward() and returns run.mean(loss)"
            )
        self._calls.append(optimizer)

    def check_lane(self, *, is_first: bool) -> None:
        """At the end of a lane: reject it without `step`, or without `backward` if another lane has one."""
        has_calls = len(self._calls) > self._lane_start
        if has_calls and not self.has_stepped:
            raise ConfigError(
                "run.backward(loss) was called in a batch, but run.step(optimizer) was not; call it for every batch; "
                "accumulate gradients over batches with lanes or global_batch_size"
            )
        has_earlier = self._lane_start > 0
        if not is_first and has_calls != has_earlier:
            raise ConfigError(
                "run.backward(loss) was called for some batches of a step and not for others; call it for every batch, "
                "with 0 * loss to skip a batch"
            )

    def _check_backward(self) -> None:
        if not self._calls:
            instead = "loss.backward() was called instead" if self._hooks.has_seen_plain else "call it first"
            raise ConfigError(f"run.step(optimizer) needs run.backward(loss) in the same batch; {instead}")
        if self._hooks.has_seen_plain:
            raise ConfigError(
                "loss.backward() and run.backward(loss) were both called in one step; use run.backward for all losses"
            )

    def _check_other_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject further updates in a batch if other lanes of this rank have computed their gradients before them."""
        if not self._has_further_lanes:
            return
        last_backward = len(self._calls) - 1 - self._calls[::-1].index(None)
        if optimizer in self._calls[last_backward:]:
            raise ConfigError(
                f"run.step was called twice for one batch with the same optimizer, but {self._lanes_text}; "
                "use as many lanes as ranks"
            )
        if any(call is not None and call is not optimizer for call in self._calls):
            raise ConfigError(
                f"{self._lanes_text}, but two optimizers step in one batch: the loss of the second would depend on an "
                "update of the first that other lanes lack; use as many lanes as ranks, or step_fn with one function "
                "for each optimizer"
            )

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._hooks.have_changed(parameters):
            raise ConfigError(
                "gradients were changed between run.backward(loss) and run.step(optimizer), before they are summed "
                "over lanes and ranks; clip with run.step(optimizer, clip_norm=…, clip_value=…), and for other changes "
                "use optimizer.register_step_pre_hook, which is called with the sums"
            )

    def _check_rates(self, optimizer: torch.optim.Optimizer) -> None:
        rates = [group["lr"] for group in optimizer.param_groups if not isinstance(group["lr"], torch.Tensor)]
        if self._has_further_lanes and self._rates.setdefault(optimizer, rates) != rates:
            raise ConfigError(
                "the learning rate changed between the batches of a step; call scheduler.step() only where "
                "run.step(optimizer) has returned True"
            )
