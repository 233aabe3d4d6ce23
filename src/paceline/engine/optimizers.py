"""Creates optimizers by name, and sets their learning rates.

An optimizer class may have two methods besides torch's, which are used if they exist: `groups_of(model)`, a static
method that returns its parameter groups, and `units()`, lists of parameters that `sharding.py` must not separate.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from paceline.config import Config, Origin, answers_to, in_one_line
from paceline.engine.joined_optimizers import JoinedOptimizers
from paceline.engine.muon import Muon
from paceline.engine.optimizer_checks import check_optimizer
from paceline.errors import ConfigError

OWN_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"muon": Muon}
KERNELS = ("fused", "foreach", "capturable", "differentiable")  # options that choose an implementation
NEEDS_CLOSURE = "evaluates a batch several times per step, but the managed loop does so once; use your own train_fn"


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `optimizer_fn(model)`, or the one that the config names, for the trainable parameters."""
    if config.optimizer_fn is not None:
        return _from_user(config, model)
    options = dict(config.optimizer.model_extra or {})
    make: Any = optimizers()[config.optimizer.name.lower()]
    trainable: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if _can_fuse(make, trainable, model) and not any(key in options for key in KERNELS):
        options["fused"] = True
    params = make.groups_of(model) if hasattr(make, "groups_of") else trainable
    return _with_lr_on_device(make(params, lr=config.optimizer.lr, **options))


def _from_user(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The value of `optimizer_fn`: an optimizer, or one per phase of a step."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    returned = config.function("optimizer_fn")(model)
    by_phase = _by_phase(returned, list(config.step_fn)) if isinstance(config.step_fn, Mapping) else {"": returned}
    for optimizer in by_phase.values():
        _check(optimizer, model, is_sharded=config.shard_optimizer)
    # DDP has recorded which parameters have gradients.
    if changed := trainable ^ {name for name, parameter in model.named_parameters() if parameter.requires_grad}:
        raise ConfigError(f"optimizer_fn changed requires_grad of {min(changed)}; do that in model_fn")
    on_device = {name: _with_lr_on_device(optimizer) for name, optimizer in by_phase.items()}
    return on_device.get("") or JoinedOptimizers(on_device)


def left_out_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """The names of the trainable parameters that an optimizer does not update; a module's name means all of its."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: list[str] = []
    for name, module in model.named_modules():
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        is_inside = any(f"{name}.".startswith(f"{outer}.") for outer in found)
        if trainable and not is_inside and not any(id(parameter) in updated for parameter in trainable):
            found.append(name)
    inside = tuple(f"{name}." for name in found)
    return found + [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in updated and not name.startswith(inside)
    ]


def _by_phase(returned: Any, phases: list[str]) -> dict[str, torch.optim.Optimizer]:
    """The optimizer of each phase, in the order of the phases."""
    if not isinstance(returned, Mapping) or set(returned) != set(phases):
        what = f"a dict with {', '.join(returned)}" if isinstance(returned, Mapping) else type(returned).__name__
        raise ConfigError(
            f"optimizer_fn returned {what}, but step_fn has the phases {', '.join(phases)}; return a dict with an "
            "optimizer for each"
        )
    return {phase: returned[phase] for phase in phases}


def _check(optimizer: Any, model: torch.nn.Module, *, is_sharded: bool) -> None:
    """Reject values that are not an optimizer of the model, or that the managed loop cannot use."""
    if isinstance(optimizer, Mapping):
        raise ConfigError("optimizer_fn returned a dict; step_fn must also be a dict with the same keys")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer_fn returned a {type(optimizer).__name__}; it must return an Optimizer")
    if needs_closure(type(optimizer)):
        raise ConfigError(f"optimizer_fn returned {type(optimizer).__name__}, which {NEEDS_CLOSURE}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "optimizer_fn returned an Optimizer of other parameters; use those of the model that it receives"
        )
    check_optimizer(optimizer, is_sharded=is_sharded)


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim and our own, by lower-case name; ours replace torch's with the same name."""
    found = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    known = {n: v for n, v in found.items() if issubclass(v, torch.optim.Optimizer) and n != "optimizer"}
    return {**known, **OWN_OPTIMIZERS}


def needs_closure(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether `step` requires a closure, as in LBFGS."""
    _, *arguments = inspect.signature(optimizer.step).parameters.values()
    named = [each for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return any(each.default is each.empty for each in named)


def _can_fuse(make: type[torch.optim.Optimizer], parameters: Sequence[torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether one kernel can update these parameters: not if they are complex or have sparse gradients."""
    has_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    devices = ("cpu",) if make is torch.optim.Adagrad else ("cpu", "cuda")
    fits = all(p.is_floating_point() and p.device.type in devices for p in parameters)
    return "fused" in inspect.signature(make).parameters and fits and not has_sparse


# --- learning rates that a CUDA graph can read ----------------------------------------------------------------------


def _with_lr_on_device(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep the learning rate of a fused optimizer in a tensor on the GPU, which a CUDA graph can read; same results."""
    if not _is_fused_on_gpu(optimizer):
        return optimizer
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = _fill(torch.empty((), dtype=torch.float32, device=device), float(group["lr"]))
        if "capturable" in group:
            group["capturable"] = True
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:  # torch would leave them unset if the first step were skipped
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # both kinds of steps occur
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lrs: Sequence[float]) -> None:
    """Set the learning rate of each group for the next step; a rate that has not changed is not sent to the GPU."""
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = lr
        elif getattr(group["lr"], "filled_with", None) != lr:
            _fill(group["lr"], lr)


def lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group; waits for the device only if the user's code has set a tensor."""
    return [float(getattr(group["lr"], "filled_with", group["lr"])) for group in optimizer.param_groups]


def can_skip(optimizer: torch.optim.Optimizer, elsewhere: Collection[torch.Tensor] = ()) -> bool:
    """Whether a step with `found_inf` set to 1 changes nothing, without waiting for the device.

    The state of the parameters `elsewhere` is on other ranks.
    """
    if not _is_fused_on_gpu(optimizer):
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    # The first step of SGD creates its momentum; if that were skipped, the momentum would be uninitialised memory.
    parameters = {p for group in optimizer.param_groups if group["momentum"] for p in group["params"]}
    here = parameters.difference(elsewhere)
    return all(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in here)


def _is_fused_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") and parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"]
    )


def _fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Fill the tensor with a value and also store it on the host: reading it from the device would wait for it."""
    tensor.fill_(value)
    tensor.filled_with = value  # type: ignore[attr-defined]
    return tensor


# --- names ----------------------------------------------------------------------------------------------------------


def problems_with(
    name: str, options: dict[str, Any], section: Mapping[str, Any] | None = None, origin: Origin | None = None
) -> list[str]:
    """One sentence for each problem with an optimizer's name and further keys.

    `section` contains the user's keys under `optimizer`, and `origin` their places.
    """
    known = optimizers()
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        return [f"optimizer.name={name!r} is not an optimizer of torch.optim; {hint}"]
    accepted = [p for p in inspect.signature(known[name.lower()]).parameters if p != "params"]
    class_name = known[name.lower()].__name__
    origin, given = origin or Origin(), {"optimizer": dict(section or {"name": name, **options})}
    unknown: dict[tuple[str, ...], Any] = {
        ("optimizer", key): value for key, value in options.items() if key not in accepted
    }
    answers = answers_to(unknown, given, origin)
    taken = {key: value for key, value in given["optimizer"].items() if ("optimizer", key) not in unknown}
    replaced = f"; or replace the section: 'optimizer={in_one_line(taken)}'" if "optimizer" in origin.overridden else ""
    problems = [answers.get(path) or _unknown(path[1], class_name, accepted) + replaced for path in unknown]
    problems = list(dict.fromkeys(problems))
    if needs_closure(known[name.lower()]):
        return [f"optimizer.name={name.lower()!r} {NEEDS_CLOSURE}"]
    if not problems:
        make: Any = known[name.lower()]
        # Without this, the first group makes torch load its compiler, which takes seconds and is not needed.
        unwrapped = {"add_param_group": inspect.unwrap(make.add_param_group)}
        try:
            type(make.__name__, (make,), unwrapped)([torch.zeros(2, 2, requires_grad=True)], **options)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            problems.append(f"optimizer={{name: {name}, …}} {error}")
        except Exception as error:  # noqa: BLE001 - a value of a wrong type may raise anything in a constructor
            problems.append(
                f"optimizer={{name: {name}, …}} cannot be created with these values of {', '.join(options)} "
                f"({type(error).__name__}: {error}); see torch.optim.{make.__name__} for valid values"
            )
    return problems


def _unknown(key: str, class_name: str, accepted: list[str]) -> str:
    """A sentence about a key that is not an argument of the optimizer's class."""
    near = difflib.get_close_matches(key, accepted, n=1)
    hint = f"did you mean optimizer.{near[0]}?" if near else f"use {', '.join(accepted)}"
    return f"optimizer.{key} is not an argument of {class_name}; {hint}"
