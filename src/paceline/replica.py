"""The model as one of many equal replicas: wrapped in DDP, with errors that name parameters."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
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


class Single:
    """A model without DDP, for a single process: the same face, nothing behind it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing would be synchronised anyway."""
        return nullcontext()

    def share_buffers(self) -> None:
        """There is nobody to share with."""


def make_model(config: Config) -> torch.nn.Module:
    """The user's model, on the CPU."""
    model = config.function("model_fn")(**config.model_args)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model_fn returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def replicate(model: torch.nn.Module, config: Config, world: World) -> Replica | Single:
    """Wrap the model in DDP, with rank 0's weights on every rank; or do without where the config says so. All ranks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model_fn returned a model without trainable parameters; there is nothing to train")
    model = model.to(world.device)
    if not config.ddp:
        if world.size > 1:
            raise ConfigError(f"ddp=false cannot be kept by {world.size} ranks; use a single one")
        return Single(model)
    return Replica(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # The managed loop reduces by itself where parameters may be unused (step.py).
        find_unused_parameters=config.find_unused_parameters and config.train_fn is not None,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _as_it_is(model: torch.nn.Module) -> torch.nn.Module:
    return model
