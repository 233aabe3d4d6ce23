"""The state in a checkpoint: `capture` collects it from a run, and the `restore_…` functions put it back.

A state is groups of named tensors, and nested plain values in which references replace the tensors. How it is stored
is in `files.py`. Nothing here depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.data.trees import TreePath, map_leaves
from paceline.engine.ema import Ema
from paceline.engine.sharding import Sharding
from paceline.errors import ConfigError
from paceline.run import tensor_files

REFERENCE = "tensor of"  # the only key of the dict that replaces a tensor in the values; part of the file format
KEEP_MODEL = "keep the model, or start a new run with --resume never"
KERNEL_OPTIONS = ("fused", "foreach", "capturable")  # optimizer options that depend on the device, not on the run

Tensors = dict[str, torch.Tensor]


@dataclass
class CheckpointState:
    """The state of a run at one step."""

    groups: dict[str, Tensors]  # "weights" and "optimizer"; "ema" and "loss" if the run has them
    values: dict[str, Any]  # everything else: counters, options, and references to the tensors
    owners: dict[str, int] = field(default_factory=dict)  # sharded optimizer: the rank that holds each of its tensors

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensors in self.groups.values() for tensor in tensors.values())


# --- capture -------------------------------------------------------------------------------------------------------


def capture(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    counters: dict[str, Any],
    sharding: Sharding | None = None,
    loss: Tensors | None = None,
) -> CheckpointState:
    """Return the current state. It refers to the model's own tensors and copies none.

    All ranks, if the optimizer is sharded. Tensors that other ranks own are then on the device "meta".
    """
    weights, aliases = split_aliases(model.state_dict())
    values: dict[str, Any] = {"aliases": aliases, "counters": counters}
    groups: dict[str, Tensors] = {"weights": {}, "optimizer": {}}
    values["weights"] = _extract_tensors(weights, groups["weights"])
    optimizer_state = optimizer.state_dict() if sharding is None else sharding.state_dict()
    values["optimizer"] = _extract_tensors(with_float_rates(optimizer_state), groups["optimizer"])
    if ema is not None:
        groups["ema"] = ema.averages()
    if loss:
        groups["loss"] = {}
        values["loss"] = _extract_tensors(loss, groups["loss"])
    return CheckpointState(groups, values, sharding.owners_in(groups["optimizer"]) if sharding is not None else {})


def capture_own(
    model: torch.nn.Module, tracked: Mapping[str, Any], ema: Ema | None, counters: dict[str, Any]
) -> CheckpointState:
    """Return the current state of the user's own loop; `tracked` has the state dict of each of its objects by name."""
    weights, aliases = split_aliases(model.state_dict())
    groups: dict[str, Tensors] = {"weights": {}, "tracked": {}}
    values: dict[str, Any] = {"aliases": aliases, "counters": counters}
    values["weights"] = _extract_tensors(weights, groups["weights"])
    values["tracked"] = _extract_tensors(dict(tracked), groups["tracked"])
    if ema is not None:
        groups["ema"] = ema.averages()
    return CheckpointState(groups, values)


def tracked_states(state: CheckpointState) -> dict[str, Any]:
    """Return the state dicts that were passed to `capture_own`."""
    states: dict[str, Any] = _insert_tensors(state.values.get("tracked", {}), state.groups.get("tracked", {}))
    return states


def split_aliases(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a state dict that has every tensor once, and for each further name of a tensor the name that was kept."""
    kept: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, value in state.items():
        has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0
        key = _memory_of(value) if has_memory else name
        if key in first_names:
            aliases[name] = first_names[key]
        else:
            first_names[key] = name
            kept[name] = value
    return kept, aliases


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share only if they are the same view of the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def with_float_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with learning rates as floats. Waits for the GPU if a rate is a tensor there."""
    groups = [
        {**group, "lr": group["lr"].item()} if isinstance(group.get("lr"), torch.Tensor) else group
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _extract_tensors(tree: Any, tensors: Tensors) -> Any:
    """Return the tree with references instead of tensors, and add the tensors to `tensors` under their paths.

    Tensors that safetensors cannot store stay in the tree, as copies on the CPU.
    """

    def extract(path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not tensor_files.can_hold(leaf):
            return leaf.detach().cpu().clone()
        name = ".".join(map(str, path)).lstrip(".")
        while name in tensors:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        tensors[name] = leaf
        return {REFERENCE: name}

    return map_leaves(tree, extract, is_plain=True)


# --- restore -------------------------------------------------------------------------------------------------------


def restore_weights(state: CheckpointState, model: torch.nn.Module, source: Path, advice: str = KEEP_MODEL) -> None:
    """Load the weights into a model; raise a ConfigError with the differences if they do not fit."""
    weights = _insert_tensors(state.values["weights"], state.groups.get("weights", {}))
    weights |= {name: weights[kept] for name, kept in state.values["aliases"].items()}
    load_fitting(model, weights, source, advice)


def load_fitting(model: torch.nn.Module, values: Mapping[str, Any], source: Path, advice: str) -> None:
    """Load a state dict into a model; raise a ConfigError if names or shapes differ."""
    if problems := _differences(model.state_dict(), values):
        raise ConfigError(f"{source} does not fit the model: {'; '.join(problems)}; {advice}")
    model.load_state_dict(values)


def _differences(model: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Describe where two state dicts differ in names or shapes: the first four differences."""
    problems = [f"the model has no {name}" for name in saved if name not in model]
    problems += [f"{name} was not saved" for name in model if name not in saved]
    for name, value in saved.items():
        own = model.get(name)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape != value.shape:
            problems.append(f"{name} is {tuple(value.shape)} as saved and {tuple(own.shape)} in the model")
    return problems if len(problems) <= 4 else [*problems[:4], f"and {len(problems) - 4} more differences"]


def restore_optimizer(
    state: CheckpointState, optimizer: torch.optim.Optimizer, source: Path, indices: Collection[int] | None = None
) -> None:
    """Load the optimizer's state; with `indices`, only that of these parameters in the state dict."""
    loaded = _insert_tensors(state.values["optimizer"], state.groups.get("optimizer", {}))
    load_optimizer(loaded, optimizer, source, indices)


def load_optimizer(
    loaded: dict[str, Any], optimizer: torch.optim.Optimizer, source: Path, indices: Collection[int] | None = None,
    *, has_free_options: bool = False,
) -> None:  # fmt: skip
    """Load a state dict into an optimizer, which keeps its kernel options; raise a ConfigError if it does not fit.

    With `has_free_options`, groups may have other options: a scheduler adds some.
    """
    saved, current = loaded["param_groups"], optimizer.state_dict()["param_groups"]
    if has_free_options:
        saved, current = ([{"params": group["params"]} for group in groups] for groups in (saved, current))
    _check_param_groups(saved, current, source)
    if indices is not None:
        loaded["state"] = {index: value for index, value in loaded["state"].items() if index in indices}
    options = [{key: group[key] for key in ("lr", *KERNEL_OPTIONS) if key in group} for group in optimizer.param_groups]
    for saved, own in zip(loaded["param_groups"], options, strict=True):
        saved.update({key: own[key] for key in KERNEL_OPTIONS if key in own})
    optimizer.load_state_dict(loaded)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        if isinstance(own.get("lr"), torch.Tensor):  # a new tensor, so that no cached copy of the old rate is reused
            group["lr"] = torch.full_like(own["lr"], group["lr"])
        for parameter in group["params"]:
            _match_strides(optimizer.state.get(parameter, {}), parameter)


def _check_param_groups(saved: list[dict[str, Any]], current: list[dict[str, Any]], source: Path) -> None:
    """Raise a ConfigError if parameter groups differ in number, options or number of parameters."""
    for group, own in zip(saved, current, strict=False):
        if group.keys() != own.keys() or len(group["params"]) != len(own["params"]):
            raise ConfigError(
                f"{source} has an optimizer with {_extra_keys(group, own)} over {len(group['params'])} parameters; "
                f"that of the config has {_extra_keys(own, group)} over {len(own['params'])}; "
                "keep the optimizer, or start a new run with --resume never"
            )
    if len(saved) != len(current):
        raise ConfigError(
            f"{source} has an optimizer with {len(saved)} parameter groups; that of the config has {len(current)}; "
            "keep the optimizer, or start a new run with --resume never"
        )


def _extra_keys(group: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """List the options that only the first parameter group has."""
    return ", ".join(sorted(group.keys() - other.keys())) or "the same options"


def _match_strides(values: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give an optimizer's tensors the strides of their parameter.

    Files store contiguous tensors, and fused optimizers read state and parameter in memory order.
    """
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            values[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@torch.no_grad()
def restore_loss(state: CheckpointState, loss: Any, source: Path) -> None:
    """Load the buffers of a loss. Checkpoints of older versions and of losses without buffers have none."""
    saved: Tensors = _insert_tensors(state.values.get("loss", {}), state.groups.get("loss", {}))
    is_module = isinstance(loss, torch.nn.Module)
    own = {**dict(loss.named_parameters()), **dict(loss.named_buffers())} if is_module else {}
    if any(name not in own or own[name].shape != tensor.shape for name, tensor in saved.items()):
        raise ConfigError(
            f"{source} contains the buffers {', '.join(saved)} of a loss, but loss_fn does not have them; "
            "keep the loss, or start a new run with --resume never"
        )
    for name, tensor in saved.items():
        own[name].copy_(tensor)


def _insert_tensors(tree: Any, tensors: Tensors) -> Any:
    """Return the tree with tensors instead of references."""

    def is_reference(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {REFERENCE}

    def insert(_: TreePath, leaf: Any) -> Any:
        return tensors[leaf[REFERENCE]] if is_reference(leaf) else leaf

    return map_leaves(tree, insert, is_leaf=is_reference, is_plain=True)
