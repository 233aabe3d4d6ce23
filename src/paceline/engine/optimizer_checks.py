"""Rejects user-defined optimizers whose learning rate the managed loop cannot set, or whose state it cannot save."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError

PROBE = 7654321  # part of an optimizer's state during the check
OWN_LOOP = "or use your own train_fn"


def check_optimizer(optimizer: Optimizer, *, is_sharded: bool) -> None:
    """Reject learning rate schedulers, and inner optimizers that `schedule` or a checkpoint would miss."""
    inner = inner_optimizers(optimizer)
    if _have_scheduler([optimizer, *inner]):
        raise ConfigError(
            "optimizer_fn creates a learning rate scheduler, which the managed loop never steps; return it from "
            "scheduler_fn(optimizer), or set schedule"
        )
    if not inner:
        return
    names = ", ".join(sorted({type(each).__name__ for each in inner}))
    holds = f"optimizer_fn returned a {type(optimizer).__name__}, which contains another optimizer ({names})"
    if is_sharded:
        raise ConfigError(f"{holds}, and shard_optimizer=true cannot divide their state; set shard_optimizer: false")
    one = f"return one optimizer with a group for each set of parameters, {OWN_LOOP}"
    if not _shares_groups(optimizer, inner):
        raise ConfigError(f"{holds} with its own param_groups, so schedule would not set its learning rate; {one}")
    if lacking := {"state", "param_groups"} - optimizer.state_dict().keys():
        keys = " and ".join(sorted(lacking))
        raise ConfigError(f"{holds}, and its state_dict lacks {keys}; add them, {OWN_LOOP}")
    if not _restores_state(optimizer, inner):
        raise ConfigError(f"{holds}, whose state is missing in its state_dict and load_state_dict; {one}")


def inner_optimizers(outer: Optimizer) -> list[Optimizer]:
    """The optimizers in the attributes of an optimizer, in lists and dicts in them, and in the attributes of those."""
    seen, waiting, found = {id(outer)}, [*vars(outer).values()], []
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Optimizer):
            found.append(each)
            waiting += vars(each).values()
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple, set)):
            waiting += each
    return found


def _have_scheduler(optimizers: Sequence[Optimizer]) -> bool:
    """Whether one of these optimizers has a scheduler, which changes attributes of the optimizer or refers to it."""
    for optimizer in optimizers:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            return True
        # In a state that optimizer_fn has loaded, it may come from a scheduler of an earlier run.
        if not optimizer.state and any("initial_lr" in group for group in optimizer.param_groups):
            return True
    # ReduceLROnPlateau leaves nothing in the optimizer. In Python 3.10 the scheduler's __dict__ refers to it.
    referrers = gc.get_referrers(*optimizers)
    return any(isinstance(each, LRScheduler) or (isinstance(each, dict) and "_last_lr" in each) for each in referrers)


def _shares_groups(outer: Optimizer, inner: Sequence[Optimizer]) -> bool:
    """Whether the inner optimizers share the groups of the outer one, so that one learning rate is set for both."""
    known = {id(group) for group in outer.param_groups}
    return all(id(group) in known for each in inner for group in each.param_groups)


def _restores_state(outer: Optimizer, inner: Sequence[Optimizer]) -> bool:
    """Whether the outer state dict contains the state of the inner optimizers, and loading it restores them."""
    before = [each.state for each in inner]
    try:
        is_saved = all(_saves_state(outer, each) for each in inner)
        saved = outer.state_dict()
        outer.load_state_dict(copy.deepcopy(saved))
    except Exception:  # noqa: BLE001 - these methods may be the user's; what they raise now, they raise in a resume
        return False
    is_loaded = all(each.state is not state for each, state in zip(inner, before, strict=True))
    return is_saved and is_loaded and _shares_groups(outer, inner)


def _saves_state(outer: Optimizer, inner: Optimizer) -> bool:
    """Whether the outer optimizer's state dict contains the inner one's state, tested with a marker value."""
    parameter = inner.param_groups[0]["params"][0]
    state = inner.state.get(parameter)
    inner.state[parameter] = {**(state or {}), "paceline_probe": torch.tensor(PROBE)}
    try:
        leaves = tree_leaves(outer.state_dict())
    finally:
        if state is None:
            del inner.state[parameter]
        else:
            inner.state[parameter] = state
    return any(isinstance(leaf, torch.Tensor) and leaf.shape == () and leaf.item() == PROBE for leaf in leaves)
