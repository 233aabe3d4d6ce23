"""The model as one of many equal replicas: wrapped in DDP, with errors that name parameters."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.config import Config
from paceline.errors import ConfigError, UnusedParameters
from paceline.world import World

UNFINISHED = "Expected to have finished reduction in the prior iteration"


class Replica(DistributedDataParallel):
    """DDP whose complaint about unused parameters gives their names."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """All ranks: the first forward after a reduction also sends rank 0's buffers to the others."""
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            raise UnusedParameters(self._names_in(str(error))) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """A replica pickles and copies as the model that it wraps: a process group cannot travel."""
        return _as_it_is, (self.module,)

    def without_gradient(self) -> list[str]:
        """The names of trainable parameters that the last backward passes did not reach."""
        return [name for name, parameter in self._trainable() if parameter.grad is None]

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, such as BatchNorm's statistics, before they are used. All ranks."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def _names_in(self, message: str) -> list[str]:
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name for name, _ in self._trainable()]
        return [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]


def make_model(config: Config) -> torch.nn.Module:
    """The user's model, on the CPU."""
    model = config.function("model_fn")(**config.model_args)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model_fn returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def replicate(model: torch.nn.Module, config: Config, world: World) -> Replica:
    """Wrap the model in DDP, with rank 0's weights on every rank. All ranks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model_fn returned a model without trainable parameters; there is nothing to train")
    return Replica(
        model.to(world.device),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _as_it_is(model: torch.nn.Module) -> torch.nn.Module:
    return model
