"""The model as one of many equal replicas: wrapped in DDP, with errors that name parameters."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.config import Config, Settings
from paceline.config.phases import functions_in
from paceline.data.feed import Feed
from paceline.data.seeding import keyed_generators
from paceline.data.sources import is_stream
from paceline.data.trees import tensors_in, to_channels_last
from paceline.engine.forward_state import ForwardState, ParameterKey
from paceline.engine.objective import Objective, run_model
from paceline.engine.outer_state import check_outer_weights, outer_state
from paceline.engine.precision import autocast
from paceline.errors import ConfigError, UnusedParameters
from paceline.user_code import described, with_place
from paceline.world import World

VIEW_ERROR = "view size is not compatible with input tensor's size and stride"
BROADCAST_BYTES = 250 * 2**20  # in one message, as DDP has it
UNFINISHED_ERROR = "Expected to have finished reduction in the prior iteration"


class _StepCall:
    """A step as the only argument of DDP's forward, which would copy a tuple or a dict."""

    def __init__(self, objective: Objective, batch: Any) -> None:
        self.objective, self.batch = objective, batch


class Replica(DistributedDataParallel):
    """DDP whose error about unused parameters names them, and which reports when it broadcasts buffers."""

    on_buffers: Callable[[bool], None] | None = None  # called before (True) and after (False) the broadcast

    def __init__(self, module: torch.nn.Module, loss: Any = None, **options: Any) -> None:
        """`loss` may have buffers, too; the options are DDP's. All ranks."""
        self.forward_state = ForwardState(module, loss)  # DDP's constructor calls `_assign_modules_buffers`
        super().__init__(module, **options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """All ranks: the first forward after a reduction also sends rank 0's buffers to the others."""
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if UNFINISHED_ERROR not in str(error):
                raise
            raise UnusedParameters(self._names_in(str(error))) from None

    def run_step(self, objective: Objective, batch: Any) -> Any:
        """The value of a `step_fn`, as one forward pass of DDP: it may call any part of the model, any number of times.

        All ranks, as `forward`.
        """
        return self(_StepCall(objective, batch))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Overrides DDP's method, which `forward` calls between the preparations for a forward and a backward."""
        if not (inputs and isinstance(inputs[0], _StepCall)):
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        # Without DDP's `_inside_ddp_forward`, which would let the compiler split the graph by DDP's buckets: compiled
        # code would then round in another way than on a single rank.
        return inputs[0].objective(self.module, inputs[0].batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the model without DDP: a process group cannot be pickled."""
        return _identity, (self.module,)

    def _sync_buffers(self) -> None:
        """Overrides DDP's method, called at the start of a forward. All ranks."""
        if self.on_buffers is not None:
            self.on_buffers(True)
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        if self.on_buffers is not None:
            self.on_buffers(False)

    def add_moving(self, moving: Iterable[ParameterKey]) -> None:
        """Treat these frozen parameters as buffers. All ranks, with the same ones."""
        self.forward_state.add_moving(moving)
        self._assign_modules_buffers()  # or DDP would send nothing where the model has no buffer

    def _assign_modules_buffers(self) -> None:
        """Overrides DDP's method: sets the tensors that `_sync_buffers` sends."""
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        # Flat, because DDP cannot write to a model's only buffer where a dimension of size 1 has an odd stride.
        self.modules_buffers = [_flat(each) for each in (*self.modules_buffers, *self.forward_state.beyond_model())]

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers, such as BatchNorm's statistics, before they are used. All ranks."""
        for buffer in self.forward_state.tensors().values():
            sent = buffer.contiguous()  # some backends send only contiguous tensors
            dist.broadcast(sent, src=0)
            if sent is not buffer:
                buffer.copy_(sent)

    def _names_in(self, message: str) -> list[str]:
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name for name, _ in self._trainable()]
        return [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]


class PlainModel:
    """A model without DDP, for a single rank, with the interface of `Replica`."""

    def __init__(self, module: torch.nn.Module, loss: Any = None) -> None:
        self.module, self.forward_state = module, ForwardState(module, loss)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def add_moving(self, moving: Iterable[ParameterKey]) -> None:
        """Treat these frozen parameters as buffers."""
        self.forward_state.add_moving(moving)

    def no_sync(self) -> AbstractContextManager[None]:
        """Does nothing: there are no gradients to synchronise."""
        return nullcontext()

    def share_buffers(self) -> None:
        """Does nothing: there is only one rank."""


class BareReplica:
    """A model without DDP on each of several ranks, for the user's own loop with `run`; has the interface of `Replica`.

    The user's code may call parts of the model directly, which DDP does not see.
    """

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        """Send rank 0's weights and buffers to all ranks. All ranks."""
        self.module, self.forward_state, self._world = module, ForwardState(module), world
        self._send([parameter.detach() for parameter in module.parameters()])
        self.share_buffers()

    def include(self, name: str, module: torch.nn.Module) -> None:
        """Treat a further module like the model. All ranks."""
        self.forward_state.include(name, module)
        self._send([parameter.detach() for parameter in module.parameters()])
        self.share_buffers()

    def share_buffers(self) -> None:
        """Send rank 0's buffers, such as BatchNorm's statistics, to all ranks. All ranks."""
        self._send([_flat(buffer) for buffer in self.forward_state.tensors().values()])

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Broadcast tensors of rank 0, many in one message. All ranks."""
        if self._world.size > 1 and tensors:
            group = dist.distributed_c10d._get_default_group()
            dist._broadcast_coalesced(group, tensors, BROADCAST_BYTES, 0)


def make_model(config: Config) -> torch.nn.Module:
    """The user's model, on the CPU; the same on every rank, including attributes that are not weights."""
    with keyed_generators(config.seed, "model"):
        model = config.function("model_fn")(**config.model_args)
    if not isinstance(model, torch.nn.Module):
        name, what = with_place("model_fn", config.model_fn), described(model)
        raise ConfigError(f"{name} returned {what}; it must return a torch.nn.Module")
    _copy_weights(model)
    return model


def _copy_weights(model: torch.nn.Module) -> None:
    """Copy the weights into memory of this process, at aligned addresses.

    Libraries map weights from files. A write to such a file would change the weights of the run, and some kernels give
    other last bits for the unaligned addresses of weights in a file.
    """
    copies: dict[int, torch.UntypedStorage] = {}  # tensors that share memory still share it after the copy
    for tensor in {*model.parameters(), *model.buffers()}:
        if _is_plain(tensor):
            old, offset = tensor.untyped_storage(), tensor.storage_offset()
            if old.data_ptr() not in copies:
                copies[old.data_ptr()] = old.clone()  # type: ignore[no-untyped-call]
            own = torch.empty(0, dtype=tensor.dtype)
            own.set_(copies[old.data_ptr()], offset, tensor.shape, tensor.stride())
            is_expanded = 0 in tensor.stride()  # its elements share memory and cannot be written one by one
            tensor.data = own.clone(memory_format=torch.contiguous_format) if is_expanded else own


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary strided tensor with elements in host memory."""
    if is_lazy(tensor) or type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_view = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.numel() > 0 and not is_view


def replicate(
    model: torch.nn.Module, settings: Settings, world: World, *, through_ddp: bool = False
) -> Replica | PlainModel:
    """Wrap the model in DDP, with rank 0's weights on every rank, unless `ddp` is false. All ranks.

    A single rank of the managed loop has nothing to sum, and needs no memory for DDP's buckets, unless `through_ddp`.
    """
    check_trainable(model, settings, world)
    model = place_model(model, settings, world.device)
    if settings.sync_batchnorm:
        model = _with_sync_batchnorm(model, settings, world)
    if not settings.ddp and world.size > 1:
        raise ConfigError(f"ddp=false needs a single rank, but there are {world.size}; use --procs 1, or ddp: true")
    if settings.compression == "powersgd" and world.size > 1:
        if settings.channels_last:
            raise ConfigError("compression=powersgd cannot send channels-last filters; set channels_last: false")
        if world.backend == "gloo" and world.device.type == "cuda":  # only the default stream waits for Gloo's sums
            raise ConfigError(
                "compression=powersgd needs backend=nccl on GPUs, not gloo; use compression: bf16 or fp16"
            )
    check_outer_weights(settings)
    sums_nothing = world.size == 1 and settings.train_fn is None and not through_ddp
    if sums_nothing or not settings.ddp:
        return PlainModel(model, outer_state(settings))
    return _in_ddp(model, settings, world)


def check_trainable(model: torch.nn.Module, settings: Settings, world: World) -> None:
    """Refuse a model that has nothing to train, or that cannot be kept identical on all ranks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{with_place('model_fn', settings.model_fn)} returned a model without trainable parameters; keep layers "
            "in attributes or nn.ModuleList, not in a list or a dict, and requires_grad=True for what is trained"
        )
    if settings.keeps_state and world.size > 1:
        _check_layers(model)


def _check_layers(model: torch.nn.Module) -> None:
    """Refuse layers and parameters that the managed loop cannot keep identical on all ranks."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{name or 'the model'} is sparse=True, but sparse gradients are summed on one rank only; "
                "use sparse=False, --procs 1, or a train_fn without run"
            )
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} has max_norm={module.max_norm:g}, which changes weights by the samples of one "
                "rank; limit the norm in forward instead, or use --procs 1"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, but complex gradients are summed on one rank only; "
                "use two real parameters, --procs 1, or a train_fn without run"
            )


def place_model(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.nn.Module:
    """The model on its device, with channels-last filters if the settings ask for them."""
    model = model.to(device)
    if settings.channels_last:
        _set_layout(model, torch.channels_last)
    return model


def _set_layout(model: torch.nn.Module, layout: torch.memory_format) -> None:
    # A filter with one input channel has the same memory in both layouts; DDP warns if only its strides differ.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    for module in model.modules():  # filters only: a model may rely on the strides of its other parameters
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)):
            # Not `contiguous(…)`, which leaves 1 × 1 filters with strides that their gradients do not have.
            module.weight.data = module.weight.data.to(memory_format=layout)


def _with_sync_batchnorm(model: torch.nn.Module, settings: Settings, world: World) -> torch.nn.Module:
    if world.device.type != "cuda":
        raise ConfigError("sync_batchnorm=true but the ranks run on the CPU, torch has it only for GPUs; remove it")
    if settings.train_fn is None and settings.lanes not in (None, world.size):
        # A rank whose lanes are empty in a short step would not call the collective, and the others would wait.
        raise ConfigError(
            f"sync_batchnorm=true needs one lane for each rank, but lanes={settings.lanes} and there are {world.size} "
            "ranks; leave lanes out, or use as many processes"
        )
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def is_channels_last(config: Config, model: torch.nn.Module, feed: Feed, world: World) -> bool:
    """Whether images and filters are laid out channels-last; the same on all ranks. All ranks."""
    if config.channels_last == "auto":
        return all(world.gather_objects(_suits_channels_last(model, feed, world.device)))
    return config.channels_last


def _suits_channels_last(model: torch.nn.Module, feed: Feed, device: torch.device) -> bool:
    """Whether the model is on a GPU, has filters, and accepts channels-last images."""
    has_filters = any(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    is_possible = device.type == "cuda" and has_filters and not is_stream(feed.dataset)
    if not is_possible:
        return False
    steps = functions_in(feed.config.step_fn)
    run = steps[0] if steps else run_model
    return accepts_channels_last(model, feed.sample(), feed.config.precision, run)


def accepts_channels_last(
    model: torch.nn.Module, batch: Any, precision: str = "fp32", run: Callable[..., Any] = run_model
) -> bool:
    """Whether a copy of the model runs on channels-last images: many models call `view`, which fails.

    Runs forward and backward, as in training, so the libraries that the first step needs are loaded by then, too.
    """
    device = next(iter(tensors_in(batch))).device
    try:
        trial = copy.deepcopy(model).to(device).train()
        _set_layout(trial, torch.channels_last)
        with autocast(precision, device):
            output = run(trial, to_channels_last(batch))
        scores = [tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad]
        if scores:
            torch.stack(scores).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - the first step reports all other errors
        return VIEW_ERROR not in str(error)
    return True


def _in_ddp(model: torch.nn.Module, settings: Settings, world: World) -> Replica:
    return Replica(
        model,
        outer_state(settings),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # The managed loop does its own reduction where parameters may be unused (gradients.py).
        find_unused_parameters=settings.find_unused_parameters and settings.train_fn is not None,
        static_graph=settings.static_graph,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in one dimension, if the tensor is contiguous."""
    return tensor.detach().view(-1) if tensor.is_contiguous() else tensor


def _identity(model: torch.nn.Module) -> torch.nn.Module:
    return model
