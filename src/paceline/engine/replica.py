"""The model as one of many equal replicas: wrapped in DDP, with errors that name parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.config import Config, Settings
from paceline.data.feed import Feed
from paceline.data.seeding import keyed_generators
from paceline.data.sources import is_stream
from paceline.data.trees import tensors_in, to_channels_last
from paceline.engine.buffers import Buffers, Name
from paceline.engine.precision import autocast
from paceline.errors import ConfigError, DataError, UnusedParameters
from paceline.world import World

NO_VIEW = "view size is not compatible with input tensor's size and stride"
UNFINISHED = "Expected to have finished reduction in the prior iteration"


class Replica(DistributedDataParallel):
    """DDP whose complaint about unused parameters gives their names, and which says when it waits for buffers."""

    on_buffers: Callable[[bool], None] | None = None  # called before a forward sends rank 0's buffers, and after

    def __init__(self, module: torch.nn.Module, loss: Any = None, **options: Any) -> None:
        """`loss` may have buffers, too; the options are DDP's. All ranks."""
        self.forward_state = Buffers(module, loss)  # before DDP asks what there is to send
        super().__init__(module, **options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """All ranks: the first forward after a reduction also sends rank 0's buffers to the others."""
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            raise UnusedParameters(self._names_in(str(error))) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """A replica pickles and copies as the model that it wraps: a process group cannot be pickled."""
        return _as_it_is, (self.module,)

    def _sync_buffers(self) -> None:
        """DDP's, at the beginning of a forward. All ranks."""
        if self.on_buffers is not None:
            self.on_buffers(True)
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        if self.on_buffers is not None:
            self.on_buffers(False)

    def adopt(self, moving: Iterable[Name]) -> None:
        """Treat these frozen parameters as buffers. All ranks, with the same ones."""
        self.forward_state.adopt(moving)
        self._assign_modules_buffers()  # or DDP would find nothing to send where the model has no buffer

    def _assign_modules_buffers(self) -> None:
        """DDP's: what `_sync_buffers` sends."""
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        # Flat, because DDP cannot write to the only buffer of a model where a dimension of one has an odd stride.
        self.modules_buffers = [_flat(each) for each in (*self.modules_buffers, *self.forward_state.beyond_model())]

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, such as BatchNorm's statistics, before they are used. All ranks."""
        for buffer in self.forward_state.live().values():
            sent = buffer.contiguous()  # some backends send nothing else
            dist.broadcast(sent, src=0)
            if sent is not buffer:
                buffer.copy_(sent)

    def _names_in(self, message: str) -> list[str]:
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name for name, _ in self._trainable()]
        return [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]


class Single:
    """A model without DDP, for a single process: the same face, nothing behind it."""

    def __init__(self, module: torch.nn.Module, loss: Any = None) -> None:
        self.module, self.forward_state = module, Buffers(module, loss)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def adopt(self, moving: Iterable[Name]) -> None:
        """Treat these frozen parameters as buffers."""
        self.forward_state.adopt(moving)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing would be synchronised anyway."""
        return nullcontext()

    def share_buffers(self) -> None:
        """There is nobody to share with."""


def make_model(config: Config) -> torch.nn.Module:
    """The user's model, on the CPU: the same wherever it is made, also in what its weights do not hold."""
    with keyed_generators(config.seed, "model"):
        model = config.function("model_fn")(**config.model_args)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model_fn returned a {type(model).__name__}; it must return a torch.nn.Module")
    _take_over(model)
    return model


def _take_over(model: torch.nn.Module) -> None:
    """Copy the weights into memory of this process, where nobody else writes and where they begin at round addresses.

    Libraries map weights from files. Whoever writes to such a file then changes the weights of a run; and some kernels
    give other last bits for the odd addresses at which weights lie in a file.
    """
    taken: dict[int, torch.UntypedStorage] = {}  # what shares memory goes on sharing it
    for tensor in {*model.parameters(), *model.buffers()}:
        if _is_plain(tensor):
            old, offset = tensor.untyped_storage(), tensor.storage_offset()
            if old.data_ptr() not in taken:
                taken[old.data_ptr()] = old.clone()  # type: ignore[no-untyped-call]
            own = torch.empty(0, dtype=tensor.dtype)
            own.set_(taken[old.data_ptr()], offset, tensor.shape, tensor.stride())
            is_expanded = 0 in tensor.stride()  # nobody can write to one place in it
            tensor.data = own.clone(memory_format=torch.contiguous_format) if is_expanded else own


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but numbers in the memory of the host."""
    if is_lazy(tensor) or type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_view = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.numel() > 0 and not is_view


def replicate(model: torch.nn.Module, settings: Settings, world: World) -> Replica | Single:
    """Wrap the model in DDP, with rank 0's weights on every rank; or do without where the config says so. All ranks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model_fn returned a model without trainable parameters; there is nothing to train")
    model = place(model, settings, world.device)
    if settings.sync_batchnorm:
        model = _with_shared_statistics(model, settings, world)
    if settings.train_fn is None and world.size > 1:
        _check_layers(model)
    if not settings.ddp and world.size > 1:
        raise ConfigError(f"ddp=false cannot be kept by {world.size} ranks; use a single one")
    if settings.compression == "powersgd" and world.size > 1:
        if settings.channels_last:
            raise ConfigError("compression=powersgd cannot send filters that lie by channels; set channels_last: false")
        if world.backend == "gloo" and world.device.type == "cuda":  # only the default stream waits for Gloo's sums
            raise ConfigError(
                "compression=powersgd needs backend=nccl on GPUs, not gloo; use compression: bf16 or fp16"
            )
    return _in_ddp(model, settings, world) if settings.ddp else Single(model, settings.loss_fn)


def _check_layers(model: torch.nn.Module) -> None:
    """Refuse what the managed loop cannot keep alike on all ranks."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{name or 'the model'} is sparse=True, the managed loop adds sparse gradients up on one rank only; "
                "use sparse=False, --procs 1, or your own train_fn"
            )
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} has max_norm={module.max_norm:g}, which changes weights by the samples of one "
                "rank; limit what forward makes of them instead, or use --procs 1"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, and the managed loop adds up complex gradients on one rank only; "
                "use two real parameters, --procs 1, or your own train_fn"
            )


def place(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.nn.Module:
    """The model on its device, in the layout that the config asks for; what is left to `auto` is as it comes."""
    model = model.to(device)
    if settings.channels_last:
        _lay(model, torch.channels_last)
    return model


def place_loss(loss: Any, device: torch.device) -> Any:
    """A loss that is a module, as a copy on the device: another run of this process starts from the original."""
    return copy.deepcopy(loss).to(device) if isinstance(loss, torch.nn.Module) else loss


def _lay(model: torch.nn.Module, layout: torch.memory_format) -> None:
    for module in model.modules():  # filters alone: a model may take its other parameters to lie row by row
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)):
            # Not `contiguous(…)`, which leaves 1 × 1 filters with strides that their gradients do not have.
            module.weight.data = module.weight.data.to(memory_format=layout)


def _with_shared_statistics(model: torch.nn.Module, settings: Settings, world: World) -> torch.nn.Module:
    if world.device.type != "cuda":
        raise ConfigError("sync_batchnorm=true but the ranks run on the CPU, torch has it for GPUs; remove it")
    if settings.train_fn is None and settings.lanes not in (None, world.size):
        # A rank whose lanes are empty in a short step would not meet the others there.
        raise ConfigError(
            f"sync_batchnorm=true needs one lane for each rank, but lanes={settings.lanes} and there are {world.size} "
            "ranks; leave lanes out, or use as many processes"
        )
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def is_channels_last(config: Config, model: torch.nn.Module, feed: Feed, world: World) -> bool:
    """Whether images and filters are laid out channels-last; the same on all ranks. All ranks."""
    if config.channels_last == "auto":
        return all(world.gather_objects(_suits_channels(model, feed, world.device)))
    return config.channels_last


def _suits_channels(model: torch.nn.Module, feed: Feed, device: torch.device) -> bool:
    """Yes on a GPU if the model has filters and takes images that lie by channels."""
    has_filters = any(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    is_possible = device.type == "cuda" and has_filters and not is_stream(feed.dataset)
    return is_possible and takes_channels(model, feed.sample(), feed.config.precision)


def takes_channels(model: torch.nn.Module, batch: Any, precision: str = "fp32") -> bool:
    """Whether a model takes images that lie by channels, tried on a copy: many call `view`, which does not.

    Forward and backward, as in training; so the libraries that the first step needs are loaded by then, too.
    """
    device = next(iter(tensors_in(batch))).device
    try:
        trial = copy.deepcopy(model).to(device).train()
        _lay(trial, torch.channels_last)
        with autocast(precision, device):
            output, _ = run_model(trial, to_channels_last(batch))
        scores = [tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad]
        if scores:
            torch.stack(scores).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - all else will be said when the model trains
        return NO_VIEW not in str(error)
    return True


def run_model(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    """The model's output and the target: `(*inputs, target)` of a tuple, `labels` of a dict."""
    if isinstance(batch, Mapping):
        named = {key: value for key, value in batch.items() if key != "labels"}
        return model(**named), batch.get("labels")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(
            f"a batch is a {type(batch).__name__}; the data set must give (*inputs, target), or a dict with labels"
        )
    *inputs, target = batch
    return model(*inputs), target


def _in_ddp(model: torch.nn.Module, settings: Settings, world: World) -> Replica:
    return Replica(
        model,
        settings.loss_fn,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # The managed loop reduces by itself where parameters may be unused (step.py).
        find_unused_parameters=settings.find_unused_parameters and settings.train_fn is not None,
        static_graph=settings.static_graph,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in one dimension, if it is in order."""
    return tensor.detach().view(-1) if tensor.is_contiguous() else tensor


def _as_it_is(model: torch.nn.Module) -> torch.nn.Module:
    return model
