"""Sharding without process groups: ranks are threads here, and what they send each other passes through queues."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import files
from paceline.checkpoint.files import files_of_rank, load, split_into_files, transfers_to_writers, write_values
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.state import CheckpointState, capture, restore_optimizer
from paceline.engine import scatter, sharding
from paceline.engine.clipping import clip_by_norm
from paceline.engine.digest import sha256_of, sha256_of_each, sha256_of_optimizer
from paceline.engine.flat import starts_of
from paceline.engine.integer_sum import BLOCK, IntegerSum, Scratch
from paceline.engine.muon import Muon
from paceline.engine.scatter import OwnerOrder, ReduceScatter
from paceline.engine.sharding import Sharding, balanced_owners, owners_of, rounds_of
from paceline.errors import ConfigError
from paceline.run import tensor_files

WAIT_S = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- who owns what ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_loads_differ_by_no_more_than_the_largest_part(sizes: list[int], world_size: int) -> None:
    ranks = balanced_owners(sizes, world_size)
    loads = [sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == r) for r in range(world_size)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_frozen_parameters_weigh_nothing() -> None:
    _, *others = parameters = [
        torch.zeros(900, requires_grad=False),
        *(torch.zeros(9, requires_grad=True) for _ in range(4)),
    ]
    owners = owners_of(torch.optim.SGD(parameters, lr=0.1), 2)
    assert sorted(owners[1:]) == [0, 0, 1, 1]
    sent = [p for buckets in rounds_of(parameters, owners, 1e9) for bucket in buckets for p in bucket.parameters]
    assert {id(parameter) for parameter in sent} == {id(parameter) for parameter in others}


def test_matrices_that_muon_stacks_have_one_owner() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 2), nn.Linear(2, 4))
    optimizer = Muon(Muon.groups_of(model))
    owners = owners_of(optimizer, 3)
    assert len(owners) == len(list(model.parameters()))
    assert len(set(owners[:3])) == 1
    assert set(owners) == {0, 1, 2}


def test_buckets_have_one_owner_and_one_format_and_keep_to_the_limit() -> None:
    sizes, formats = [3, 700, 20, 20, 20, 0, 900, 5], [torch.float32, torch.float32, torch.bfloat16, torch.float32] * 2
    parameters = [
        torch.zeros(size, dtype=dtype, requires_grad=True) for size, dtype in zip(sizes, formats, strict=True)
    ]
    owners = [0, 0, 0, 1, 1, 0, 0, 1]
    owner = dict(zip(parameters, owners, strict=True))
    rounds = rounds_of(parameters, owners, 200)
    assert all(len({bucket.owner for bucket in buckets}) == len(buckets) for buckets in rounds)
    buckets = [bucket for buckets in rounds for bucket in buckets]
    assert sum(len(bucket.parameters) for bucket in buckets) == 7  # the empty one is not sent
    for bucket in buckets:
        assert {owner[parameter] for parameter in bucket.parameters} == {bucket.owner}
        assert len({parameter.dtype for parameter in bucket.parameters}) == 1
        assert len(bucket.parameters) == 1 or sum(parameter.nbytes for parameter in bucket.parameters) <= 200


def test_lbfgs_is_refused_in_one_sentence() -> None:
    optimizer = torch.optim.LBFGS([torch.zeros(2, requires_grad=True)])
    with pytest.raises(ConfigError, match=r"^shard_optimizer=true cannot be used with LBFGS, .*; remove"):
        Sharding(optimizer, SimpleNamespace(rank=0, size=2), 100)  # type: ignore[arg-type]


# --- ranks that are threads ---------------------------------------------------------------------------------------


class Post:
    """What ranks send each other."""

    def __init__(self, size: int) -> None:
        self.size, self.lock, self.queues = size, threading.Lock(), defaultdict[Any, Queue[Any]](Queue)

    def put(self, thing: Any, *address: Any) -> None:
        self._queue(address).put(pickle.dumps(thing))

    def get(self, *address: Any) -> Any:
        return pickle.loads(self._queue(address).get(timeout=WAIT_S))

    def _queue(self, address: Any) -> Queue[Any]:
        with self.lock:
            return self.queues[address]


class Rank:
    """A rank's World, and its torch.distributed."""

    backend, device = "gloo", torch.device("cpu")

    def __init__(self, rank: int, post: Post) -> None:
        self.rank, self.size, self.is_main, self.post, self.calls = rank, post.size, rank == 0, post, 0

    def gather_objects(self, thing: Any) -> list[Any]:
        self.calls += 1
        for other in range(self.size):
            self.post.put(thing, "object", self.calls, self.rank, other)
        return [self.post.get("object", self.calls, other, self.rank) for other in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        self.calls += 1
        for other in range(self.size) if src == self.rank else ():
            self.post.put(tensor, "broadcast", self.calls, other)
        call = self.calls
        return SimpleNamespace(wait=lambda: tensor.copy_(self.post.get("broadcast", call, self.rank)))

    def all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        everyone = torch.stack(self.gather_objects(tensor))
        tensor.copy_(everyone.amax(0) if op == torch.distributed.ReduceOp.MAX else everyone.sum(0))

    def isend(self, tensor: torch.Tensor, target: int, group: Any, tag: int = 0) -> Any:
        self.post.put(tensor, "sent", self.rank, target, tag)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: torch.Tensor, source: int, group: Any, tag: int = 0) -> Any:
        return SimpleNamespace(wait=lambda: tensor.copy_(self.post.get("sent", source, self.rank, tag)))


def on_ranks(size: int, run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results of `run(world)` in one thread per rank."""
    here, post = {}, Post(size)

    def of_this_thread(name: str) -> Callable[..., Any]:
        return lambda *arguments, **keys: getattr(here[threading.get_ident()], name)(*arguments, **keys)

    def start(rank: int) -> Any:
        here[threading.get_ident()] = world = Rank(rank, post)
        return run(world)

    names = ("all_reduce", "broadcast", "isend", "irecv")
    calls = {name: of_this_thread(name) for name in names}
    fake = SimpleNamespace(new_group=lambda **keys: None, ReduceOp=torch.distributed.ReduceOp, **calls)
    for module in (scatter, sharding):
        monkeypatch.setattr(module, "dist", fake)
    with ThreadPoolExecutor(size) as threads:
        return [future.result(WAIT_S) for future in [threads.submit(start, rank) for rank in range(size)]]


class Mixed(nn.Module):
    """Channels-last filters, matrices of one shape, two formats, something frozen and something empty."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.long = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW([x for x in p if x.dtype == torch.float32], lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad, whose state is made at once": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.Adam([{"params": p[:3], "lr": 0.5}, {"params": p[3:]}], lr=0.1),
    "muon": lambda p: Muon(split_for_muon(p), lr=0.1),
}


def split_for_muon(parameters: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "use_muon": True},
        {"params": [p for p in parameters if p.ndim == 1 and p.dtype == torch.float32], "use_muon": False},
    ]


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, generator = Mixed(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model, OPTIMIZERS[name](list(model.parameters()))


def train(model: nn.Module, step: Callable[[], Any], numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in its layout
        step()


def step_of(model: nn.Module, sharding: Sharding) -> Callable[[], None]:
    def step() -> None:
        sharding.drop_others(model.parameters())
        sharding.step()

    return step


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, sharding: Any = None) -> None:
    """One rank's part of a checkpoint."""
    rank, size = (sharding.world.rank, sharding.world.size) if sharding is not None else (0, 1)
    kept = capture(model, optimizer, None, {}, sharding)
    buffers = HostBuffers(sharding)
    mine = files_of_rank(rank, size, split_into_files(kept))
    buffers.reserve(kept, mine)
    folder.mkdir(exist_ok=True)
    for file, tensors in buffers.copy(kept, mine)().items():
        tensor_files.write_tensors(folder / file, tensors)
    if rank == 0:
        write_values(folder, kept)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# --- sums and norms -----------------------------------------------------------------------------------------------

LIKE = [
    torch.empty(300), torch.empty(0, 2), torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    torch.empty(7), torch.empty(()), torch.empty(513),
]  # fmt: skip


def gradients_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.empty_like(each).copy_(torch.randn(each.shape, generator=generator)) for each in LIKE]


@pytest.mark.parametrize("owners", [[0, 1, 2, 1, 0, 2], [1, 1, 1, 1, 1, 1], [2, 0, 2, 0, 2, 0]])
def test_owners_get_the_bits_of_a_sum_for_all(owners: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank owns nothing, or has gradients that are empty."""
    size = 3
    sums = [IntegerSum(LIKE, size, Scratch()) for _ in range(size)]
    exponents = torch.stack([each.exponents([gradients_of(rank)]) for rank, each in enumerate(sums)]).amax(0)
    integers = [each.integers([gradients_of(rank)], exponents) for rank, each in enumerate(sums)]
    expected, added = [torch.empty_like(each) for each in LIKE], integers[0] + integers[1] + integers[2]
    integers[0].copy_(added)
    sums[0].write(expected)

    def run(world: Any) -> dict[int, torch.Tensor]:
        order = OwnerOrder(range(len(LIKE)), owners, world)
        like = [LIKE[index] for index in order.indices]
        total, mine = IntegerSum(like, size, Scratch()), gradients_of(world.rank)
        lanes = [[mine[index] for index in order.indices]]
        largest = torch.stack(world.gather_objects(total.exponents(lanes))).amax(0)
        assert order.sizes(starts_of(like, BLOCK)) == [
            sum(-(-LIKE[index].numel() // BLOCK) * BLOCK for index, owner in enumerate(owners) if owner == rank)
            for rank in range(size)
        ]
        ReduceScatter(world, None, Scratch()).integers(total, total.integers(lanes, largest), mine, order)
        return {index: mine[index] for index in order.mine}

    found = {index: each for of_rank in on_ranks(size, run, monkeypatch) for index, each in of_rank.items()}
    assert sorted(found) == list(range(len(LIKE)))
    for index, each in found.items():
        assert torch.equal(each, expected[index])
        assert each.stride() == LIKE[index].stride()


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_owners_get_sums_of_floats_in_the_format_that_is_sent(
    sent: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [1, 0, 1, 0, 0, 1]
    expected = [(a.to(sent) + b.to(sent)).float() for a, b in zip(gradients_of(0), gradients_of(1), strict=True)]

    def run(world: Any) -> bool:
        mine, order = gradients_of(world.rank), OwnerOrder(range(len(LIKE)), owners, world)
        ReduceScatter(world, None, Scratch()).floats(mine, order, sent)
        return all(torch.equal(mine[index], expected[index]) for index in order.mine)

    assert on_ranks(2, run, monkeypatch) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_gradients_are_clipped_by_the_bits_of_the_norm_of_all(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch clips them on one rank; on seven, some ranks have no gradient."""

    def model_of_many() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(torch.zeros(number + 1)) for number in range(5 if size == 7 else 50)]
        train(nn.ParameterList(parameters), lambda: None, range(1))
        return parameters, torch.optim.SGD(parameters[:-1], lr=0.1)  # one is in no optimizer

    parameters, _ = model_of_many()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.3)
    alone, _ = model_of_many()
    assert clip_by_norm(alone, 0.3, None) == expected

    def run(world: Any) -> list[int]:
        mine, optimizer = model_of_many()
        sharding = Sharding(optimizer, world, 100)
        sharding.drop_others(mine)
        assert clip_by_norm(mine, 0.3, sharding) == expected
        own = [place for place, parameter in enumerate(mine) if parameter.grad is not None]
        assert all(torch.equal(mine[place].grad, parameters[place].grad) for place in own)
        return own

    assert sorted(place for own in on_ranks(size, run, monkeypatch) for place in own) == list(range(len(parameters)))


def test_the_norm_of_two_formats_is_the_same_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make("adamw")
    train(model, lambda: None, range(1))
    expected = clip_by_norm([p for p in model.parameters() if p.requires_grad], 0.3, None)

    def run(world: Any) -> Any:
        mine, optimizer = make("adamw")
        train(mine, lambda: None, range(1))
        used, sharding = [p for p in mine.parameters() if p.requires_grad], Sharding(optimizer, world, 100)
        sharding.drop_others(used)
        return clip_by_norm(used, 0.3, sharding)

    assert on_ranks(3, run, monkeypatch) == [expected] * 3


def test_a_number_that_is_not_finite_on_one_rank_is_known_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: Any) -> float:
        sharding = Sharding(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), world, 100)
        return sharding.largest(torch.tensor(float(world.rank == 1))).item()

    assert on_ranks(3, run, monkeypatch) == [1.0] * 3


# --- steps and checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_optimizer_gives_the_bits_and_the_checkpoint_of_one_that_is_not(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 500)  # several files, with tensors of several owners
    model, optimizer = make(name)
    train(model, optimizer.step, range(3))
    save(model, optimizer, tmp_path / "whole")
    weights, kept = sha256_of(model.state_dict()), sha256_of_optimizer(optimizer)
    train(model, optimizer.step, range(3, 5))

    def run(world: Any) -> dict[str, Any]:
        mine, its_optimizer = make(name)
        sharding = Sharding(its_optimizer, world, bucket_bytes=200)
        train(mine, step_of(mine, sharding), range(3))
        save(mine, its_optimizer, tmp_path / "sharded", sharding)
        held = {p for p, of_it in its_optimizer.state.items() if of_it}
        digest = sha256_of_each(sharding.gathered_state())
        train(mine, step_of(mine, sharding), range(3, 5))
        return {"weights": sha256_of(mine.state_dict()), "kept": digest, "held": len(held)}

    outcomes = on_ranks(size, run, monkeypatch)
    assert {outcome["weights"] for outcome in outcomes} == {sha256_of(model.state_dict())} != {weights}
    assert outcomes[0]["kept"] == kept
    assert sum(outcome["held"] for outcome in outcomes) == len([of for of in optimizer.state.values() if of])
    assert contents(tmp_path / "sharded") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rank_resumes_with_its_part_of_a_whole_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(name)
    train(model, optimizer.step, range(2))
    save(model, optimizer, tmp_path / "c")
    at_the_time = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer.step, range(2, 4))

    def resume(world: Any) -> tuple[str, int]:
        mine, its_optimizer = make(name)
        mine.load_state_dict(at_the_time)
        sharding = Sharding(its_optimizer, world, bucket_bytes=1000)
        restore_optimizer(load(tmp_path / "c"), its_optimizer, tmp_path / "c", sharding.mine)
        held = len(its_optimizer.state)
        train(mine, step_of(mine, sharding), range(2, 4))
        assert len(its_optimizer.state) == held
        return sha256_of(mine.state_dict()), held

    outcomes = on_ranks(2, resume, monkeypatch)
    assert {weights for weights, _ in outcomes} == {sha256_of(model.state_dict())}
    assert sum(held for _, held in outcomes) == len(optimizer.state)


def test_what_a_format_of_files_does_not_know_goes_along_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: Any) -> Any:
        parameters = [torch.ones(3, dtype=torch.complex128, requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        sharding = Sharding(optimizer, world, 1000)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2j)
        sharding.drop_others(parameters)
        sharding.step()
        return capture(nn.Module(), optimizer, None, {}, sharding).values["optimizer"]["state"]

    for kept in on_ranks(2, run, monkeypatch):
        assert [kept[place]["momentum_buffer"].tolist() for place in (0, 1)] == [[2j] * 3] * 2


def test_tensors_go_from_who_has_them_to_who_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 8)
    tensors = {f"state.{n}.m": torch.zeros(2) for n in range(4)}  # a file each
    kept = CheckpointState({"optimizer": tensors}, {}, owners={name: n // 2 for n, name in enumerate(tensors)})
    shares = [files_of_rank(rank, 2, split_into_files(kept)) for rank in range(2)]
    writes = [{name for file in share for name in file.tensor_names} for share in shares]
    moves = transfers_to_writers(kept, 2)
    assert moves
    for name in tensors:
        hops = [(source, target) for moved, source, target in moves if moved == name]
        place = hops[0][1] if hops else kept.owners[name]
        assert len(hops) <= 1
        assert name in writes[place]
