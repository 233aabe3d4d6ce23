"""Optimizers by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.config import Config, Schedule
from paceline.engine.muon import Muon
from paceline.engine.optimizer_checks import check_optimizer
from paceline.errors import ConfigError

KERNELS = ("fused", "foreach", "capturable", "differentiable")  # who gives one of these has chosen
SEVERAL_LOOKS = "takes several looks at a batch, the managed loop takes one; use your own train_fn"


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The user's `optimizer_fn(model)`, or the optimizer that the config names, over the trainable parameters."""
    if config.optimizer_fn is not None:
        return _kept_on_device(_users_own(config, model))
    options = dict(config.optimizer.model_extra or {})
    make: Any = optimizers()[config.optimizer.name.lower()]
    if make is Muon:
        return _kept_on_device(Muon(Muon.groups_of(model), lr=config.optimizer.lr, **options))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if _can_fuse(make, trainable, model) and not any(key in options for key in KERNELS):
        options["fused"] = True
    made: torch.optim.Optimizer = make(trainable, lr=config.optimizer.lr, **options)
    return _kept_on_device(made)


def _users_own(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = config.function("optimizer_fn")(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer_fn returned a {type(optimizer).__name__}; it must return an Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"optimizer_fn returned LBFGS, which {SEVERAL_LOOKS}")
    # DDP has taken down which parameters have gradients.
    if changed := trainable ^ {name for name, parameter in model.named_parameters() if parameter.requires_grad}:
        raise ConfigError(f"optimizer_fn changed requires_grad of {min(changed)}; do that in model_fn")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError("optimizer_fn returned an Optimizer of other parameters; use those of the model it is given")
    check_optimizer(optimizer, is_sharded=config.shard_optimizer)
    return optimizer


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim, by its name in small letters; `muon` is ours, which takes any parameters."""
    found = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    known = {n: v for n, v in found.items() if issubclass(v, torch.optim.Optimizer) and n != "optimizer"}
    return {**known, "muon": Muon}


def _can_fuse(make: type[torch.optim.Optimizer], parameters: Sequence[torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether one kernel can update these parameters: not where they are complex or their gradients sparse."""
    has_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    devices = ("cpu",) if make is torch.optim.Adagrad else ("cpu", "cuda")
    fits = all(p.is_floating_point() and p.device.type in devices for p in parameters)
    return "fused" in inspect.signature(make).parameters and fits and not has_sparse


# --- what a CUDA graph can read -------------------------------------------------------------------------------------


def _kept_on_device(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Fused on a GPU, the rate is a tensor there: a recorded step reads it, and gives the bits of one that is not."""
    if not _is_fused_on_gpu(optimizer):
        return optimizer
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = _filled(torch.empty((), dtype=torch.float32, device=device), float(group["lr"]))
        if "capturable" in group:
            group["capturable"] = True
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:  # torch would leave them unset if the first step were skipped
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # steps of both kinds are meant
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lrs: Sequence[float]) -> None:
    """The learning rate of each group for the next step; on a GPU nothing is sent where it has not changed."""
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = lr
        elif getattr(group["lr"], "filled_with", None) != lr:
            _filled(group["lr"], lr)


def lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group; waits for the device only where somebody else has set a tensor."""
    return [float(getattr(group["lr"], "filled_with", group["lr"])) for group in optimizer.param_groups]


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with `found_inf` set to 1 changes nothing, without anybody waiting for the device."""
    if not _is_fused_on_gpu(optimizer):
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    # The first step of SGD makes its momentum; skipped, it would leave there whatever the memory held.
    parameters = [p for group in optimizer.param_groups if group["momentum"] for p in group["params"]]
    return all(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in parameters)


def _is_fused_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") and parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"]
    )


def _filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The tensor with this value, which is remembered beside it: asking the device would wait for it."""
    tensor.fill_(value)
    tensor.filled_with = value  # type: ignore[attr-defined]
    return tensor


# --- names and rates ------------------------------------------------------------------------------------------------


def problems_with(name: str, options: dict[str, Any]) -> list[str]:
    """What is wrong with an optimizer's name and further keys, one sentence each."""
    known = optimizers()
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        return [f"optimizer.name={name!r} is not an optimizer of torch.optim; {hint}"]
    accepted = [p for p in inspect.signature(known[name.lower()]).parameters if p != "params"]
    problems = []
    for key in options:
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean optimizer.{near[0]}?" if near else f"it takes {', '.join(accepted)}"
            problems.append(f"optimizer.{key} is not an argument of {known[name.lower()].__name__}; {hint}")
    if name.lower() == "lbfgs":
        return [f"optimizer.name='lbfgs' {SEVERAL_LOOKS}"]
    if not problems:
        make: Any = known[name.lower()]
        # As it comes, the first group makes torch load its compiler, which takes seconds and has no part in this.
        unwrapped = {"add_param_group": inspect.unwrap(make.add_param_group)}
        try:
            type(make.__name__, (make,), unwrapped)([torch.zeros(2, 2, requires_grad=True)], **options)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            problems.append(f"optimizer={{name: {name}, …}} {error}")
        except Exception as error:  # noqa: BLE001 - a value of a wrong type may raise anything in a constructor
            problems.append(
                f"optimizer={{name: {name}, …}} cannot be made with these values of {', '.join(options)} "
                f"({type(error).__name__}: {error}); give them as torch.optim.{make.__name__} takes them"
            )
    return problems


def lr_at(step: int, base: float, schedule: Schedule, total_steps: int | None) -> float:
    """The learning rate of the update that takes `step` to `step + 1` (pure)."""
    if step < schedule.warmup_steps:
        return base * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return base
    assert total_steps is not None, "a schedule with an end needs to know where that is"
    done = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    down = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return base * (schedule.final + (1 - schedule.final) * down)
