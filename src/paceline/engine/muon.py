"""Muon: hidden weights are updated along the nearest orthogonal matrix of their momentum; the rest by AdamW or SGD.

A step makes no decisions based on values of tensors, so it can be recorded in a CUDA graph; with `found_inf` set to 1
it changes nothing, as with torch's fused optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values from (0, 1] close to 1 in few iterations
REST_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0},
}


class Muon(torch.optim.Optimizer):
    """Muon for parameters with two or more dimensions, and `rest` for all others, in one optimizer.

    `rest` is `{name: adamw, lr, betas, eps, weight_decay}` or `{name: sgd, lr, momentum, weight_decay}`, with Nesterov
    momentum. Pass `Muon.groups_of(model)`, or your own groups with `use_muon` true or false.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        keep_norm: bool = False,
        rest: Mapping[str, Any] | None = None,
    ) -> None:
        """With `keep_norm`, matrices are scaled to an orthogonal norm in each step; for layers before a norm."""
        if not (0 <= momentum < 1 and ns_steps >= 1 and lr >= 0 and weight_decay >= 0):
            raise ValueError("needs 0 <= momentum < 1, ns_steps >= 1, and no negative lr or weight_decay")
        self._rest = _rest_settings(rest or {})
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "weight_decay": weight_decay,
            "keep_norm": keep_norm, "use_muon": True, "rest": self._rest["rest"], "betas": (0.9, 0.95), "eps": 1e-8,
            "fused": True,  # keeps `step` on the device when torch loads a state
        }  # fmt: skip
        given = list(params)
        super().__init__(given if given and isinstance(given[0], dict) else _split_groups(given, set()), defaults)
        self._step_supports_amp_scaling = True

    @staticmethod
    def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
        """Groups of the trainable parameters of a model: matrices and filters; all others, including embeddings."""
        layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, layers)}
        return _split_groups([parameter for parameter in model.parameters() if parameter.requires_grad], embeddings)

    def units(self) -> list[list[torch.Tensor]]:
        """Parameters in lists that are computed in one matrix product: the last bits depend on their number."""
        groups = [_stackable(g["params"]) if g["use_muon"] else [[p] for p in g["params"]] for g in self.param_groups]
        return [unit for units in groups for unit in units]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with `use_muon: False`, its defaults are the settings of `rest`."""
        if not param_group.get("use_muon", True):
            param_group = {**self._rest, **param_group}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(parameter.is_complex() for parameter in group["params"]):
            raise ValueError("complex parameters cannot be trained with Muon; use another optimizer")
        if group["use_muon"] and any(parameter.ndim < 2 for parameter in group["params"]):
            raise ValueError(
                "Muon needs parameters of two or more dimensions; put the others into a group with use_muon=False"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. The attributes `found_inf` and `grad_scale`, if set, come from torch's GradScaler."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["use_muon"]:
                self._step_muon(group, used)
            elif used:
                (self._step_adamw if group["rest"] == "adamw" else self._step_sgd)(group, used)
        return loss

    def _step_muon(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        momentum, decay, lr = group["momentum"], group["weight_decay"], group["lr"]
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for same in _stackable(parameters):
            buffers = [self._state_of(parameter, "momentum_buffer") for parameter in same]
            gradients = _stacked([parameter.grad for parameter in same])
            if scale is not None:
                gradients = gradients / scale
            averages = _stacked(buffers).lerp(gradients, 1 - momentum)
            direction = gradients.lerp(averages, momentum) if group["nesterov"] else averages
            rows, columns = direction.shape[-2:]
            update = orthogonal(direction, group["ns_steps"]) * max(1, rows / columns) ** 0.5
            weights = _stacked(same)
            if group["keep_norm"]:
                weights = weights * (min(rows, columns) ** 0.5 / weights.norm(dim=(-2, -1), keepdim=True))
            _assign(buffers, averages, found_inf)
            _assign(same, weights - lr * (update + decay * weights), found_inf)

    def _step_adamw(self, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [self._state_of(parameter, "exp_avg") for parameter in parameters],
            [self._state_of(parameter, "exp_avg_sq") for parameter in parameters],
            [],
            [self._steps(parameter) for parameter in parameters],
            fused=True, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip

    def _step_sgd(self, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> None:
        sgd(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [self._state_of(parameter, "momentum_buffer") for parameter in parameters],
            fused=True, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"], dampening=0,
            nesterov=group["momentum"] > 0, maximize=False,
        )  # fmt: skip

    def _state_of(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """A tensor of the state in the shape of the parameter, zeros at first."""
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter)
        return state[key]  # type: ignore[no-any-return]

    def _steps(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return state["step"]  # type: ignore[no-any-return]


def orthogonal(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """An approximation of the nearest orthogonal matrix of each in a stack of matrices, by Newton–Schulz iteration."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # singular values at most 1
    if x.is_cuda:
        x = x.bfloat16()  # enough: the iteration corrects its own errors
    a, b, c = QUINTIC
    for _ in range(iterations):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def _rest_settings(rest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of groups without Muon; raises ValueError for a wrong one."""
    if not isinstance(rest, Mapping):
        raise ValueError(f"rest={rest!r} is not a section; write, for example, rest: {{name: adamw, lr: 1e-3}}")
    name = rest.get("name", "adamw")
    if name not in REST_DEFAULTS:
        raise ValueError(f"rest.name={name!r} is not known; use {' or '.join(REST_DEFAULTS)}")
    unknown = [key for key in rest if key not in (*REST_DEFAULTS[name], "name")]
    if unknown:
        raise ValueError(f"rest.{unknown[0]} is not a setting of {name}; use {', '.join(REST_DEFAULTS[name])}")
    for key, value in rest.items():
        if key not in ("name", "betas") and not (isinstance(value, (int, float)) and value >= 0):
            raise ValueError(f"rest.{key}={value!r} must be a number of at least 0")
    return {**REST_DEFAULTS[name], **{key: value for key, value in rest.items() if key != "name"}, "rest": name}


def _split_groups(parameters: Sequence[torch.Tensor], others: set[int]) -> list[dict[str, Any]]:
    is_hidden = [parameter.ndim >= 2 and id(parameter) not in others for parameter in parameters]
    groups = [
        {"params": [p for p, hidden in zip(parameters, is_hidden, strict=True) if hidden is wanted], "use_muon": wanted}
        for wanted in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _stackable(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of parameters whose matrices can be stacked, so that one product computes all of them."""
    found: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            shape = (len(parameter), parameter.numel() // len(parameter))
            found.setdefault((shape, parameter.device, parameter.dtype), []).append(parameter)
    return list(found.values())


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A stack of matrices in fp32; filters are flattened, independently of their memory layout."""
    return torch.stack([tensor.reshape(len(tensor), -1) for tensor in tensors if tensor is not None]).float()


def _assign(tensors: Sequence[torch.Tensor], stack: torch.Tensor, found_inf: torch.Tensor | None) -> None:
    """Copy the new values into the tensors, unless `found_inf` is 1."""
    new = [value.view(tensor.shape) for value, tensor in zip(stack.unbind(), tensors, strict=True)]
    if found_inf is not None:
        is_bad = found_inf.bool()
        new = [torch.where(is_bad, tensor, value.to(tensor.dtype)) for value, tensor in zip(new, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), new)
