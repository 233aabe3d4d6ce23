from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import state
from paceline.checkpoint.state import (
    REST,
    Shard,
    Staging,
    State,
    capture,
    load,
    put_loss,
    put_optimizer,
    put_weights,
    shards_of,
    share_of,
    write_rest,
)
from paceline.engine.buffers import Buffers
from paceline.engine.digest import sha256_of, sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.muon import Muon
from paceline.errors import ConfigError
from paceline.run import tensor_files

SOURCE = Path("runs/a/checkpoints/step-00000003")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These models are too small for threads, and what is in files is looked at here, not when it is on the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x.abs().long().sum(1) % 7)))


class Remembers(nn.Module):
    """A layer with a state that is no tensor, with one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: dict[str, Any] = {"words": ["a", ("b", 3)], "scale": torch.zeros(2), 7: None}

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, seen: Any) -> None:
        self.seen = seen


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


class Shelf(nn.Module):
    """Buffers of kinds and shapes that are easy to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("low", torch.randn(3).bfloat16())
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("wide", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class ListKeeper(torch.optim.Optimizer):
    """Keeps tensors in lists and dicts, as LBFGS and second-order methods do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept.setdefault("past", []).append(parameter.grad.clone())
                kept["pair"] = (parameter.grad.clone(), {"n": len(kept["past"]), "sum": parameter.grad.sum()})
                parameter.data.sub_(parameter.grad, alpha=0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "batchnorm": normed, "extra state": Remembers, "channels last": channels_last, "buffers": Shelf
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "two groups": lambda parameters: torch.optim.Adam(
        [{"params": [first], "lr": 0.5} if not n else {"params": [first]} for n, first in enumerate(parameters)]
    ),
    "lists": ListKeeper,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "fused momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "muon": Muon,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None = None, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if ema is not None:
            ema.update()
    if isinstance(model, Remembers):
        model.seen = {"words": ["c", ("d", 4)], "scale": torch.randn(2), 7: None}


def write(kept: State, folder: Path, world_size: int = 1) -> list[tensor_files.Written]:
    """Write a state as `world_size` ranks would."""
    folder.mkdir(exist_ok=True)
    written = [write_rest(folder, kept)]
    for rank in range(world_size):
        copied = Staging().copy(kept, share_of(rank, world_size, shards_of(kept)))()
        written += [tensor_files.write_tensors(folder / file, tensors) for file, tensors in copied.items()]
    return written


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Everything in a tree of any depth, with its place."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{path}.{key!r}")]
    if isinstance(tree, (list, tuple)):
        kind = type(tree).__name__
        return [leaf for n, value in enumerate(tree) for leaf in leaves(value, f"{path}.{kind} {n}")]
    return [(path, sha256_of({"": tree}) if isinstance(tree, torch.Tensor) else tree)]


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        sha256_of(model.state_dict()),
        sha256_of_optimizer(optimizer),
        leaves(dict(model.state_dict())),
        leaves(optimizer.state_dict()),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_goes_on_has_the_weights_and_the_optimizer_it_had(
    model: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SHARD_BYTES", 256)
    torch.manual_seed(1)
    before = MODELS[model]()
    optimized = OPTIMIZERS[optimizer](before.parameters())
    train(before, optimized)
    write(capture(before, optimized, None, {"step": 2}), tmp_path / "c", world_size=2)

    torch.manual_seed(2)
    after = MODELS[model]()
    fresh = OPTIMIZERS[optimizer](after.parameters())
    assert all_of(after, fresh) != all_of(before, optimized)
    read = load(tmp_path / "c")
    put_weights(read, after, SOURCE)
    put_optimizer(read, fresh, SOURCE)
    assert all_of(after, fresh) == all_of(before, optimized)
    assert read.rest["counters"] == {"step": 2}

    for run in ((before, optimized), (after, fresh)):
        torch.manual_seed(3)
        train(*run)
    assert all_of(after, fresh) == all_of(before, optimized)


def test_weights_that_were_tied_are_kept_once_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = capture(model, optimizer, None, {})
    assert sorted(kept.groups["weights"]) == ["first.weight", "norm.bias", "norm.weight"]
    write(kept, tmp_path / "c")
    other = Tied()
    put_weights(load(tmp_path / "c"), other, SOURCE)
    assert other.first.weight is other.last.weight
    assert torch.equal(other.last.weight, model.first.weight)


def test_memory_layout_of_the_model_survives(tmp_path: Path) -> None:
    model = channels_last()
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}), tmp_path / "c")
    other = channels_last()
    put_weights(load(tmp_path / "c"), other, SOURCE)
    assert other[1].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    assert torch.equal(other[1].weight, model[1].weight)  # type: ignore[index, arg-type]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With gradients that are the same in every layout."""
    for parameter in model.parameters():
        gradient = torch.arange(float(parameter.numel())).reshape(parameter.shape)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


def test_the_layout_of_the_model_changes_no_byte_of_a_checkpoint(tmp_path: Path) -> None:
    written = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        model = channels_last().to(memory_format=layout)
        # A rate of zero: the ends of rows are rounded otherwise, and a layout has ends of its own.
        optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True), Ema(model, 0.9)
        take_step(model, optimizer)
        written.append(write(capture(model, optimizer, ema, {}), tmp_path / str(layout)))
    assert len(written[0]) == 4
    assert written[0] == written[1]


def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    before = channels_last().to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.AdamW(before.parameters(), fused=True)
    take_step(before, optimizer)
    write(capture(before, optimizer, None, {}), tmp_path / "c")
    after = channels_last()
    fresh = torch.optim.AdamW(after.parameters(), fused=True)
    read = load(tmp_path / "c")
    put_weights(read, after, SOURCE)
    put_optimizer(read, fresh, SOURCE)
    take_step(before, optimizer)
    take_step(after, fresh)
    states = [made.state_dict()["state"] for made in (optimizer, fresh)]
    torch.testing.assert_close([dict(before.state_dict()), states[0]], [dict(after.state_dict()), states[1]])


def test_a_rate_that_is_a_tensor_is_kept_as_a_number_and_comes_back_as_a_tensor(tmp_path: Path) -> None:
    def make(lr: Any, **kernels: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = normed()
        return model, torch.optim.AdamW(model.parameters(), lr=lr, **kernels)

    model, optimizer = make(torch.tensor(0.25), fused=True, capturable=True)
    train(model, optimizer)
    kept = capture(model, optimizer, None, {})
    assert type(kept.rest["optimizer"]["param_groups"][0]["lr"]) is float
    write(kept, tmp_path / "c")
    for lr, kernels in ((torch.tensor(0.5), {"fused": True}), (0.5, {"foreach": True}), (0.5, {})):
        _, fresh = make(lr, **kernels)
        put_optimizer(load(tmp_path / "c"), fresh, SOURCE)
        [group] = fresh.param_groups
        assert type(group["lr"]) is type(lr)
        assert group["lr"] == 0.25
        # Which kernel computes is this machine's affair, not the checkpoint's.
        assert (group["fused"], group["foreach"]) == (kernels.get("fused"), kernels.get("foreach"))
        assert group["capturable"] is False


def test_the_average_of_the_weights_is_kept(tmp_path: Path) -> None:
    model = normed()
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.5), Ema(model, 0.9)
    train(model, optimizer, ema)
    write(capture(model, optimizer, ema, {}), tmp_path / "c")
    assert sha256_of(load(tmp_path / "c").groups["ema"]) == sha256_of(ema.averages())
    assert sha256_of(ema.averages()) != sha256_of(dict(model.named_parameters()))


def test_names_that_would_meet_do_not_overwrite_each_other(tmp_path: Path) -> None:
    model = Remembers()
    model.seen = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "1": torch.tensor(3), 1: torch.tensor(4)}
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}), tmp_path / "c")
    other = Remembers()
    put_weights(load(tmp_path / "c"), other, SOURCE)
    assert repr(other.seen) == repr(model.seen)


class RunningLoss(nn.Module):
    """A loss with a part that is saved, one that is not, and weights that are frozen."""

    def __init__(self, value: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full(shape, value))
        self.register_buffer("phase", torch.full((2,), value, dtype=torch.complex64))
        self.register_buffer("cache", torch.full((2,), value), persistent=False)
        self.inner = nn.Linear(2, 2).requires_grad_(False)


def kept_with(loss: Any, folder: Path) -> State:
    model = nn.Linear(2, 2)
    kept = Buffers(model, loss).of_loss()
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}, None, kept), folder)
    return load(folder)


def test_the_buffers_of_a_loss_are_kept(tmp_path: Path) -> None:
    then, now = RunningLoss(2.0), RunningLoss(1.0)
    kept = kept_with(then, tmp_path / "c")
    assert (tmp_path / "c" / "loss.safetensors").exists()
    put_loss(kept, now, SOURCE)
    assert torch.equal(now.mean, then.mean)
    assert torch.equal(now.phase, then.phase)
    assert now.cache.tolist() == [1.0, 1.0]
    assert not torch.equal(now.inner.weight, then.inner.weight)  # does not move, so it is not kept


def test_a_checkpoint_without_a_loss_leaves_it_as_it_is(tmp_path: Path) -> None:
    """As all were that are older, and as those of plain functions are."""
    kept, now = kept_with(nn.functional.cross_entropy, tmp_path / "c"), RunningLoss(1.0)
    assert not list((tmp_path / "c").glob("loss*"))
    put_loss(kept, now, SOURCE)
    assert now.mean == 1.0


@pytest.mark.parametrize("now", [RunningLoss(1.0, (3,)), nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_another_loss_than_the_checkpoints_is_refused(now: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds mean, phase of a loss that has another form than loss_fn; keep the"):
        put_loss(kept_with(RunningLoss(2.0), tmp_path / "c"), now, SOURCE)


# --- what is in the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_nothing_in_a_checkpoint_can_run_code(model: str, tmp_path: Path) -> None:
    trained = MODELS[model]()
    optimizer = ListKeeper(trained.parameters())
    train(trained, optimizer)
    write(capture(trained, optimizer, None, {"history": [{"loss": 0.5}], "n": 3}), tmp_path / "c")
    assert sorted({path.suffix for path in (tmp_path / "c").iterdir()}) == [".pt", ".safetensors"]
    torch.load(tmp_path / "c" / REST, weights_only=True)


def test_the_rest_is_small_whatever_the_size_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    write(capture(model, optimizer, None, {}), tmp_path / "c")
    assert (tmp_path / "c" / REST).stat().st_size < 10_000


class Odd:
    """An object that only its own module can read."""


def test_what_could_not_be_read_back_is_not_called_saved(tmp_path: Path) -> None:
    model = Remembers()
    model.seen = {"object": Odd()}
    kept = capture(model, torch.optim.SGD(model.parameters()), None, {})
    with pytest.raises(Exception, match="Odd"):
        write_rest(tmp_path, kept)


def test_a_live_state_is_captured_without_a_copy_and_its_size_told() -> None:
    model = nn.Linear(3, 2)
    kept = capture(model, torch.optim.SGD(model.parameters()), None, {})
    assert kept.groups["weights"]["weight"].data_ptr() == model.weight.data_ptr()
    assert kept.size == 4 * (6 + 2)


# --- shards -----------------------------------------------------------------------------------------------------------


def state_of(*sizes: int) -> State:
    return State({"weights": {f"w{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}}, {})


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], [[]]),
        ([10], [["w0"]]),
        ([50, 50], [["w0", "w1"]]),
        ([50, 51], [["w0"], ["w1"]]),
        ([300, 1, 300], [["w0"], ["w1"], ["w2"]]),
        ([40, 40, 40, 0, 100], [["w0", "w1"], ["w2", "w3"], ["w4"]]),
    ],
)
def test_a_group_is_cut_where_a_file_would_grow_too_large(
    sizes: list[int], parts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SHARD_BYTES", 100)
    shards = shards_of(state_of(*sizes))
    assert [list(shard.names) for shard in shards] == parts
    total = len(parts)
    expected = [f"weights-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    assert [shard.file for shard in shards] == (expected if total > 1 else ["weights.safetensors"])
    assert sum(shard.size for shard in shards) == sum(sizes)


def test_the_files_do_not_depend_on_values_or_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SHARD_BYTES", 64)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    found = []
    for world_size in (1, 2, 5, 40):
        kept = capture(model, optimizer, None, {})
        written = write(kept, tmp_path / str(world_size), world_size)
        assert len({file.name for file in written}) == len(written)  # no file is written by two ranks
        found.append(sorted(written, key=lambda file: file.name))
    assert found[1:] == found[:1] * 3
    assert sum(path.name.startswith("weights-") for path in (tmp_path / "1").iterdir()) > 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 12))
def test_ranks_share_the_files_out_exactly_once_and_evenly(sizes: list[int], world_size: int) -> None:
    shards = [Shard(f"f{n}", "weights", (), size) for n, size in enumerate(sizes)]
    shares = [share_of(rank, world_size, shards) for rank in range(world_size)]
    assert sorted(shard.file for share in shares for shard in share) == sorted(shard.file for shard in shards)
    loads = [sum(shard.size for shard in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_a_snapshot_that_later_steps_do_not_change() -> None:
    live = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(1.0), "c": torch.zeros(0)}
    kept = State({"weights": live}, {})
    staging, shards = Staging(), shards_of(kept)
    staging.reserve(kept, shards)
    first = staging.copy(kept, shards)
    live["a"] += 10
    live["b"] += 10
    copied = first()["weights.safetensors"]
    assert copied["a"].is_contiguous()
    assert torch.equal(copied["a"], torch.arange(6.0).reshape(2, 3).t())
    assert copied["b"] == 1.0
    assert torch.equal(staging.copy(kept, shards)()["weights.safetensors"]["a"], live["a"])


def test_memory_for_copies_is_made_once_and_anew_when_shapes_change() -> None:
    kept = state_of(8)
    staging, shards = Staging(), shards_of(kept)
    staging.reserve(kept, shards)
    places = [staging.copy(kept, shards)()["weights.safetensors"]["w0"].data_ptr() for _ in range(3)]
    assert len(set(places)) == 1
    kept.groups["weights"]["w0"] = torch.ones(3, dtype=torch.int16)
    assert torch.equal(staging.copy(kept, shards)()["weights.safetensors"]["w0"], torch.ones(3, dtype=torch.int16))


# --- what does not fit ------------------------------------------------------------------------------------------------


def misfits(then: nn.Module, now: nn.Module) -> list[str]:
    kept = capture(then, torch.optim.SGD(then.parameters()), None, {})
    before = sha256_of(now.state_dict())
    with pytest.raises(ConfigError) as caught:
        put_weights(kept, now, SOURCE)
    assert sha256_of(now.state_dict()) == before
    [text] = caught.value.problems
    start, end = f"{SOURCE} does not fit the model: ", "; keep the model, or begin a new run with --resume never"
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end).split("; ")


def test_a_layer_of_another_width_shows_both_shapes() -> None:
    assert misfits(nn.Linear(3, 2), nn.Linear(5, 2)) == ["weight is (2, 3) there and (2, 5) in the model"]


def test_layers_that_only_one_side_has_are_named() -> None:
    assert misfits(nn.Linear(3, 2), nn.Linear(3, 2, bias=False)) == ["the model has no bias"]
    assert misfits(nn.Linear(3, 2, bias=False), nn.Linear(3, 2)) == ["it has no bias"]


def test_of_many_differences_the_first_few_are_told() -> None:
    found = misfits(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), nn.Sequential())
    assert found == [*(f"the model has no {name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
                     "and 4 more differences"]  # fmt: skip


def test_another_optimizer_is_refused_with_both_described() -> None:
    model = nn.Linear(3, 2)
    kept = capture(model, torch.optim.SGD(model.parameters()), None, {})
    with pytest.raises(ConfigError, match=r"holds an optimizer with .*momentum.* over 2 .*; the config's has .*betas"):
        put_optimizer(kept, torch.optim.AdamW(model.parameters()), SOURCE)
    with pytest.raises(ConfigError, match=r"over 2 parameters; the config's has .* over 1"):
        put_optimizer(kept, torch.optim.SGD([model.weight]), SOURCE)
    two = torch.optim.SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(1))]}])
    with pytest.raises(ConfigError, match=r"holds an optimizer with 1 groups of parameters; the config's has 2"):
        put_optimizer(kept, two, SOURCE)


def test_memory_is_reserved_without_threads_of_torch() -> None:
    """Else there are more of them than cores, and every operation of the training thread waits for them to wake up."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    kept = State({"weights": {"large": torch.zeros(1 << 22)}}, {})
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.zeros(1 << 22).add_(1)  # this thread has its helpers now
        before, during = threads(), []

        def reserve() -> None:
            Staging().reserve(kept, shards_of(kept))
            during.append(threads() - 1)  # without this one

        worker = threading.Thread(target=reserve)
        worker.start()
        worker.join()
    finally:
        torch.set_num_threads(count)
    assert during == [before]
