"""What a checkpoint holds: groups of named tensors, and a rest of plain values.

The tensors lie in safetensors files whose number depends on their sizes alone. The rest is a small file that loads with
`weights_only=True`. Nothing here knows how many ranks there are, except who writes which file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.data.trees import TreePath, map_leaves
from paceline.engine.ema import Ema
from paceline.engine.sharding import Sharding, Transfer, dealt
from paceline.errors import ConfigError
from paceline.run import tensor_files
from paceline.run.tensor_files import Written

SHARD_BYTES = 128 << 20  # small enough to be shared out among ranks, large enough for a disk
REST = "state.pt"
TENSOR = "tensor of"  # what stands in the rest where a tensor was
NEW_RUN = "keep the model, or begin a new run with --resume never"
KERNELS = ("fused", "foreach", "capturable")  # settings of an optimizer that belong to the device, not to the run

Tensors = dict[str, torch.Tensor]


@dataclass
class State:
    """The state of a run at one step."""

    groups: dict[str, Tensors]  # "weights", "optimizer" and, if there are such, "ema" and "loss"
    rest: dict[str, Any]
    owners: dict[str, int] = field(default_factory=dict)  # of a sharded optimizer: who has a tensor that is "meta" here

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.groups.values() for tensor in tensors.values())


@dataclass(frozen=True)
class Shard:
    """One file of tensors."""

    file: str
    group: str
    names: tuple[str, ...]
    size: int


# --- into a checkpoint ---------------------------------------------------------------------------------------------


def capture(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    counters: dict[str, Any],
    sharding: Sharding | None = None,
    loss: Tensors | None = None,
) -> State:
    """The state as it is now; the tensors are the live ones, not copies. All ranks, if the optimizer is sharded."""
    weights, aliases = unshared(model.state_dict())
    kept: dict[str, Any] = {"aliases": aliases, "counters": counters}
    groups: dict[str, Tensors] = {"weights": {}, "optimizer": {}}
    kept["weights"] = _take_out(weights, groups["weights"])
    of_optimizer = optimizer.state_dict() if sharding is None else sharding.state_dict()
    kept["optimizer"] = _take_out(_with_plain_rates(of_optimizer), groups["optimizer"])
    if ema is not None:
        groups["ema"] = ema.averages()
    if loss:
        groups["loss"] = {}
        kept["loss"] = _take_out(loss, groups["loss"])
    return State(groups, kept, sharding.owners_in(groups["optimizer"]) if sharding is not None else {})


def shards_of(state: State) -> list[Shard]:
    """The files that a state is written to: a group's tensors in their order, cut where a file would grow too large."""
    shards = []
    for group, tensors in state.groups.items():
        parts: list[list[str]] = [[]]
        filled = 0
        for name, tensor in tensors.items():
            if filled + tensor.nbytes > SHARD_BYTES and parts[-1]:
                parts.append([])
                filled = 0
            parts[-1].append(name)
            filled += tensor.nbytes
        for number, names in enumerate(parts, start=1):
            place = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            size = sum(tensors[name].nbytes for name in names)
            shards.append(Shard(f"{group}{place}.safetensors", group, tuple(names), size))
    return shards


def share_of(rank: int, world_size: int, shards: Sequence[Shard]) -> list[Shard]:
    """The files that a rank writes (pure)."""
    ordered = sorted(shards, key=lambda shard: shard.file)
    writers = dealt([shard.size for shard in ordered], world_size)
    return [shard for shard, writer in zip(ordered, writers, strict=True) if writer == rank]


def moves_of(state: State, world_size: int) -> list[Transfer]:
    """The tensors of a sharded optimizer that another rank writes than the one that has them (pure)."""
    shares = [share_of(rank, world_size, shards_of(state)) for rank in range(world_size)]
    files_of_rank = ((rank, shard) for rank, share in enumerate(shares) for shard in share)
    writer = {name: rank for rank, shard in files_of_rank if shard.group == "optimizer" for name in shard.names}
    moves = [Transfer(name, owner, writer[name]) for name, owner in state.owners.items()]
    return [move for move in moves if move.source != move.target]


class Staging:
    """Memory of the host for this rank's share of a state, made once: a save pays for a copy, not for memory.

    Of a sharded optimizer a rank copies what it has, and the ranks pass it on from there to those who write it.
    """

    def __init__(self, sharding: Sharding | None = None) -> None:
        self._host: dict[tuple[str, str], torch.Tensor] = {}
        self._sharding = sharding

    def reserve(self, state: State, shards: Sequence[Shard]) -> None:
        """Have the memory, touched, so that the first copy is as fast as the next ones."""
        for group, name, tensor in [*_tensors_in(state, shards), *self._leaving(state, self._moves(state))]:
            # Not by torch: an operation with threads of its own, in this thread, makes libgomp count more threads than
            # there are cores, and from then on every operation of the training thread waits for its threads to wake up.
            self._room_for(group, name, tensor).reshape(-1).view(torch.uint8).numpy().fill(0)

    def copy(self, state: State, shards: Sequence[Shard]) -> Callable[[], dict[str, Tensors]]:
        """Copy the share; the returned function waits for the copy and gives the tensors of each file.

        With a sharded optimizer that function must be called by all ranks.
        """
        live, host, moves = [], [], self._moves(state)
        for group, name, tensor in [*_tensors_in(state, shards), *self._leaving(state, moves)]:
            room = self._room_for(group, name, tensor)
            if not tensor.is_meta:
                live.append(tensor.detach())
                host.append(room)
        if live:
            torch._foreach_copy_(host, live, non_blocking=True)
        copied = [_mark(device) for device in {tensor.device for tensor in live} if device.type == "cuda"]

        def wait() -> dict[str, Tensors]:
            for mark in copied:
                mark.synchronize()
            if self._sharding is not None:
                optimizer = {name: room for (group, name), room in self._host.items() if group == "optimizer"}
                self._sharding.pass_on(moves, optimizer)
            return {shard.file: {name: self._host[shard.group, name] for name in shard.names} for shard in shards}

        return wait

    def _moves(self, state: State) -> list[Transfer]:
        return moves_of(state, self._sharding.world.size) if self._sharding is not None else []

    def _leaving(self, state: State, moves: Sequence[Transfer]) -> list[tuple[str, str, torch.Tensor]]:
        """What this rank has and others write."""
        mine = [move for move in moves if self._sharding is not None and move.source == self._sharding.world.rank]
        return [("optimizer", move.name, state.groups["optimizer"][move.name]) for move in mine]

    def _room_for(self, group: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._host.get((group, name))
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._host[group, name] = room
        return room


def write_rest(folder: Path, state: State) -> Written:
    """Write what is not a large tensor; raises if it could not be read back, as with objects in an extra state."""
    buffer = io.BytesIO()
    torch.save(state.rest, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return tensor_files.write(folder / REST, [buffer.getbuffer()])


# --- out of a checkpoint -------------------------------------------------------------------------------------------


def load(path: Path, only: Collection[str] | None = None) -> State:
    """The state that a checkpoint holds, on the CPU; of its tensors, perhaps only some groups."""
    rest = torch.load(path / REST, weights_only=True, map_location="cpu")
    groups: dict[str, Tensors] = {}
    for file in sorted(path.glob("*.safetensors")):
        group = file.name.removesuffix(".safetensors").partition("-")[0]
        if only is None or group in only:
            groups.setdefault(group, {}).update(safetensors.torch.load_file(file))
    return State(groups, rest)


def has_average(path: Path) -> bool:
    """Whether a checkpoint holds an average of the weights."""
    return any(path.glob("ema*.safetensors"))


@torch.no_grad()
def put_trained(path: Path, model: torch.nn.Module) -> None:
    """Give a model the weights of a checkpoint that are meant to be used: their average if the run kept one."""
    state = load(path, only=("weights", "ema"))
    put_weights(state, model, path, "give the model that was trained")
    parameters = dict(model.named_parameters())
    for name, average in state.groups.get("ema", {}).items():
        parameters[name].copy_(average)


def put_weights(state: State, model: torch.nn.Module, source: Path, advice: str = NEW_RUN) -> None:
    """Give a model the weights; a ConfigError shows both values where they do not fit."""
    weights = _put_back(state.rest["weights"], state.groups.get("weights", {}))
    weights |= {name: weights[kept] for name, kept in state.rest["aliases"].items()}
    put_values(weights, model, source, advice)


def put_values(values: Mapping[str, Any], model: torch.nn.Module, source: Path, advice: str) -> None:
    """Give a model a state dict; a ConfigError shows where it does not fit."""
    if problems := _misfits(model.state_dict(), values):
        raise ConfigError(f"{source} does not fit the model: {'; '.join(problems)}; {advice}")
    model.load_state_dict(values)


def put_optimizer(
    state: State, optimizer: torch.optim.Optimizer, source: Path, places: Collection[int] | None = None
) -> None:
    """Give an optimizer its state back; only that of the parameters at these places, if they are given."""
    loaded = _put_back(state.rest["optimizer"], state.groups.get("optimizer", {}))
    for there, here in zip(loaded["param_groups"], optimizer.state_dict()["param_groups"], strict=False):
        if there.keys() != here.keys() or len(there["params"]) != len(here["params"]):
            raise ConfigError(
                f"{source} holds an optimizer with {_unlike(there, here)} over {len(there['params'])} parameters; "
                f"the config's has {_unlike(here, there)} over {len(here['params'])}; "
                "keep the optimizer, or begin a new run with --resume never"
            )
    if len(loaded["param_groups"]) != len(optimizer.param_groups):
        raise ConfigError(
            f"{source} holds an optimizer with {len(loaded['param_groups'])} groups of parameters; "
            f"the config's has {len(optimizer.param_groups)}"
        )
    if places is not None:
        loaded["state"] = {place: kept for place, kept in loaded["state"].items() if place in places}
    settings = [{key: group[key] for key in ("lr", *KERNELS) if key in group} for group in optimizer.param_groups]
    for there, here in zip(loaded["param_groups"], settings, strict=True):
        there.update({key: here[key] for key in KERNELS if key in here})
    optimizer.load_state_dict(loaded)
    for group, here in zip(optimizer.param_groups, settings, strict=True):
        if isinstance(here.get("lr"), torch.Tensor):  # a new one: who remembers what the old one held must look again
            group["lr"] = torch.full_like(here["lr"], group["lr"])
        for parameter in group["params"]:
            _lay_out(optimizer.state.get(parameter, {}), parameter)


@torch.no_grad()
def put_loss(state: State, loss: Any, source: Path) -> None:
    """Give a loss the buffers that the checkpoint holds; older checkpoints, and losses without buffers, have none."""
    kept: Tensors = _put_back(state.rest.get("loss", {}), state.groups.get("loss", {}))
    is_module = isinstance(loss, torch.nn.Module)
    here = {**dict(loss.named_parameters()), **dict(loss.named_buffers())} if is_module else {}
    if any(name not in here or here[name].shape != tensor.shape for name, tensor in kept.items()):
        raise ConfigError(
            f"{source} holds {', '.join(kept)} of a loss that has another form than loss_fn; "
            "keep the loss, or begin a new run with --resume never"
        )
    for name, tensor in kept.items():
        here[name].copy_(tensor)


def _lay_out(kept: dict[str, Any], parameter: torch.Tensor) -> None:
    """State in the layout of its parameter: files know none, and fused optimizers take both as they lie in memory."""
    for key, value in kept.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict whose learning rates are numbers, as on any device; waits for a GPU that has them."""
    groups = [
        {**group, "lr": group["lr"].item()} if isinstance(group.get("lr"), torch.Tensor) else group
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(sorted(one.keys() - other.keys())) or "the same settings"


def _misfits(model: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Where two state dicts differ in names or shapes: the first few, in words."""
    problems = [f"the model has no {name}" for name in weights if name not in model]
    problems += [f"it has no {name}" for name in model if name not in weights]
    for name, there in weights.items():
        here = model.get(name)
        if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor) and here.shape != there.shape:
            problems.append(f"{name} is {tuple(there.shape)} there and {tuple(here.shape)} in the model")
    return problems if len(problems) <= 4 else [*problems[:4], f"and {len(problems) - 4} more differences"]


# --- tensors in and out of trees -----------------------------------------------------------------------------------


def unshared(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A state dict with every tensor once, and the other names of those that have several."""
    kept: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0
        place = _place_of(value) if has_memory else name
        if place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            kept[name] = value
    return kept, aliases


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _take_out(tree: Any, tensors: Tensors) -> Any:
    """The tree with a mark in place of each tensor; the tensors are added to `tensors` under their path."""

    def take(path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not tensor_files.can_hold(leaf):
            return leaf.detach().cpu().clone()
        name = ".".join(f"{key}" for key in path).lstrip(".")
        while name in tensors:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        tensors[name] = leaf
        return {TENSOR: name}

    return map_leaves(tree, take, is_plain=True)


def _put_back(tree: Any, tensors: Tensors) -> Any:
    """The tree with the tensors in place of their marks."""

    def is_mark(node: Any) -> bool:
        return isinstance(node, Mapping) and node.keys() == {TENSOR}

    def put(_: TreePath, leaf: Any) -> Any:
        return tensors[leaf[TENSOR]] if is_mark(leaf) else leaf

    return map_leaves(tree, put, is_leaf=is_mark, is_plain=True)


def _tensors_in(state: State, shards: Sequence[Shard]) -> list[tuple[str, str, torch.Tensor]]:
    return [(shard.group, name, state.groups[shard.group][name]) for shard in shards for name in shard.names]


def _mark(device: torch.device) -> torch.cuda.Event:
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark
