"""checkpoint/state.py: what is captured can be restored, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import files
from paceline.checkpoint.files import load
from paceline.checkpoint.state import CheckpointState, capture, restore_loss, restore_optimizer, restore_weights
from paceline.engine.digest import sha256_of, sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.forward_state import ForwardState
from paceline.errors import ConfigError
from support.models import Tied, WithExtraState, channels_last, normed

from .cases import MODELS, OPTIMIZERS, train, write

SOURCE = Path("runs/a/checkpoints/step-00000003")


@pytest.fixture(autouse=True)
def _fast(without_fsync: None) -> Iterator[None]:
    """One thread, because these models are small; no fsync, because these tests read files and cut no power."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """All leaves of a tree with their paths; tensors as hashes."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{path}.{key!r}")]
    if isinstance(tree, (list, tuple)):
        kind = type(tree).__name__
        return [leaf for n, value in enumerate(tree) for leaf in leaves(value, f"{path}.{kind} {n}")]
    return [(path, sha256_of({"": tree}) if isinstance(tree, torch.Tensor) else tree)]


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        sha256_of(model.state_dict()),
        sha256_of_optimizer(optimizer),
        leaves(dict(model.state_dict())),
        leaves(optimizer.state_dict()),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_run_has_the_weights_and_the_optimizer_state_of_the_checkpoint(
    model: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 256)
    torch.manual_seed(1)
    before = MODELS[model]()
    optimized = OPTIMIZERS[optimizer](before.parameters())
    train(before, optimized)
    write(capture(before, optimized, None, {"step": 2}), tmp_path / "c", world_size=2)

    torch.manual_seed(2)
    after = MODELS[model]()
    fresh = OPTIMIZERS[optimizer](after.parameters())
    assert fingerprint(after, fresh) != fingerprint(before, optimized)
    read = load(tmp_path / "c")
    restore_weights(read, after, SOURCE)
    restore_optimizer(read, fresh, SOURCE)
    assert fingerprint(after, fresh) == fingerprint(before, optimized)
    assert read.values["counters"] == {"step": 2}

    for run in ((before, optimized), (after, fresh)):
        torch.manual_seed(3)
        train(*run)
    assert fingerprint(after, fresh) == fingerprint(before, optimized)


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = capture(model, optimizer, None, {})
    assert sorted(state.groups["weights"]) == ["first.weight", "norm.bias", "norm.weight"]
    write(state, tmp_path / "c")
    other = Tied()
    restore_weights(load(tmp_path / "c"), other, SOURCE)
    assert other.first.weight is other.last.weight
    assert torch.equal(other.last.weight, model.first.weight)


def test_the_memory_layout_of_the_model_is_kept(tmp_path: Path) -> None:
    model = channels_last()
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}), tmp_path / "c")
    other = channels_last()
    restore_weights(load(tmp_path / "c"), other, SOURCE)
    assert other[1].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    assert torch.equal(other[1].weight, model[1].weight)  # type: ignore[index, arg-type]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients that do not depend on the memory layout."""
    for parameter in model.parameters():
        gradient = torch.arange(float(parameter.numel())).reshape(parameter.shape)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


def test_the_layout_of_the_model_changes_no_byte_of_a_checkpoint(tmp_path: Path) -> None:
    written = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        model = channels_last().to(memory_format=layout)
        # A rate of zero, because vectorized kernels round the ends of rows differently, and these depend on the layout.
        optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True), Ema(model, 0.9)
        take_step(model, optimizer)
        written.append(write(capture(model, optimizer, ema, {}), tmp_path / str(layout)))
    assert len(written[0]) == 4
    assert written[0] == written[1]


def test_a_checkpoint_can_be_resumed_in_another_memory_layout(tmp_path: Path) -> None:
    before = channels_last().to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.AdamW(before.parameters(), fused=True)
    take_step(before, optimizer)
    write(capture(before, optimizer, None, {}), tmp_path / "c")
    after = channels_last()
    fresh = torch.optim.AdamW(after.parameters(), fused=True)
    read = load(tmp_path / "c")
    restore_weights(read, after, SOURCE)
    restore_optimizer(read, fresh, SOURCE)
    take_step(before, optimizer)
    take_step(after, fresh)
    states = [made.state_dict()["state"] for made in (optimizer, fresh)]
    torch.testing.assert_close([dict(before.state_dict()), states[0]], [dict(after.state_dict()), states[1]])


def test_a_learning_rate_tensor_is_saved_as_a_float_and_restored_as_the_optimizer_has_it(tmp_path: Path) -> None:
    def make(lr: Any, **kernels: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = normed()
        return model, torch.optim.AdamW(model.parameters(), lr=lr, **kernels)

    model, optimizer = make(torch.tensor(0.25), fused=True, capturable=True)
    train(model, optimizer)
    state = capture(model, optimizer, None, {})
    assert type(state.values["optimizer"]["param_groups"][0]["lr"]) is float
    write(state, tmp_path / "c")
    for lr, kernels in ((torch.tensor(0.5), {"fused": True}), (0.5, {"foreach": True}), (0.5, {})):
        _, fresh = make(lr, **kernels)
        restore_optimizer(load(tmp_path / "c"), fresh, SOURCE)
        [group] = fresh.param_groups
        assert type(group["lr"]) is type(lr)
        assert group["lr"] == 0.25
        # The choice of kernels depends on this machine, not on the checkpoint.
        assert (group["fused"], group["foreach"]) == (kernels.get("fused"), kernels.get("foreach"))
        assert group["capturable"] is False


def test_the_average_of_the_weights_is_saved(tmp_path: Path) -> None:
    model = normed()
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.5), Ema(model, 0.9)
    train(model, optimizer, ema)
    write(capture(model, optimizer, ema, {}), tmp_path / "c")
    assert sha256_of(load(tmp_path / "c").groups["ema"]) == sha256_of(ema.averages())
    assert sha256_of(ema.averages()) != sha256_of(dict(model.named_parameters()))


def test_tensors_with_equal_paths_do_not_overwrite_each_other(tmp_path: Path) -> None:
    model = WithExtraState()
    model.extra = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "1": torch.tensor(3), 1: torch.tensor(4)}
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}), tmp_path / "c")
    other = WithExtraState()
    restore_weights(load(tmp_path / "c"), other, SOURCE)
    assert repr(other.extra) == repr(model.extra)


class RunningLoss(nn.Module):
    """A loss with saved buffers, one that is not saved, and frozen weights."""

    def __init__(self, value: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full(shape, value))
        self.register_buffer("phase", torch.full((2,), value, dtype=torch.complex64))
        self.register_buffer("cache", torch.full((2,), value), persistent=False)
        self.inner = nn.Linear(2, 2).requires_grad_(False)


def state_with(loss: Any, folder: Path) -> CheckpointState:
    model = nn.Linear(2, 2)
    buffers = ForwardState(model, loss).of_loss()
    write(capture(model, torch.optim.SGD(model.parameters()), None, {}, None, buffers), folder)
    return load(folder)


def test_the_buffers_of_a_loss_are_restored(tmp_path: Path) -> None:
    before, after = RunningLoss(2.0), RunningLoss(1.0)
    state = state_with(before, tmp_path / "c")
    assert (tmp_path / "c" / "loss.safetensors").exists()
    restore_loss(state, after, SOURCE)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.phase, before.phase)
    assert after.cache.tolist() == [1.0, 1.0]
    assert not torch.equal(after.inner.weight, before.inner.weight)  # never changes, so it is not saved


def test_a_checkpoint_without_buffers_of_a_loss_leaves_the_loss_unchanged(tmp_path: Path) -> None:
    """Such as those of older versions, and of losses that are plain functions."""
    state, after = state_with(nn.functional.cross_entropy, tmp_path / "c"), RunningLoss(1.0)
    assert not list((tmp_path / "c").glob("loss*"))
    restore_loss(state, after, SOURCE)
    assert after.mean == 1.0


@pytest.mark.parametrize("after", [RunningLoss(1.0, (3,)), nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_loss_that_does_not_fit_the_checkpoint_is_refused(after: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the buffers mean, phase of a loss, but loss_fn does not have them; keep"):
        restore_loss(state_with(RunningLoss(2.0), tmp_path / "c"), after, SOURCE)


def test_a_state_is_captured_without_copying_its_tensors() -> None:
    model = nn.Linear(3, 2)
    state = capture(model, torch.optim.SGD(model.parameters()), None, {})
    assert state.groups["weights"]["weight"].data_ptr() == model.weight.data_ptr()
    assert state.nbytes == 4 * (6 + 2)


# --- states that do not fit -------------------------------------------------------------------------------------------


def differences(saved: nn.Module, model: nn.Module) -> list[str]:
    state = capture(saved, torch.optim.SGD(saved.parameters()), None, {})
    before = sha256_of(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        restore_weights(state, model, SOURCE)
    assert sha256_of(model.state_dict()) == before
    [text] = caught.value.problems
    start, end = f"{SOURCE} does not fit the model: ", "; keep the model, or start a new run with --resume never"
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end).split("; ")


def test_a_difference_in_shape_shows_both_shapes() -> None:
    assert differences(nn.Linear(3, 2), nn.Linear(5, 2)) == ["weight is (2, 3) as saved and (2, 5) in the model"]


def test_names_that_only_one_side_has_are_listed() -> None:
    assert differences(nn.Linear(3, 2), nn.Linear(3, 2, bias=False)) == ["the model has no bias"]
    assert differences(nn.Linear(3, 2, bias=False), nn.Linear(3, 2)) == ["bias was not saved"]


def test_the_first_four_of_many_differences_are_listed() -> None:
    found = differences(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), nn.Sequential())
    assert found == [*(f"the model has no {name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
                     "and 4 more differences"]  # fmt: skip


def test_an_optimizer_that_does_not_fit_is_refused_with_the_options_of_both() -> None:
    model = nn.Linear(3, 2)
    state = capture(model, torch.optim.SGD(model.parameters()), None, {})
    with pytest.raises(ConfigError, match=r"has an optimizer with .*momentum.* over 2 .*; that of the .*betas"):
        restore_optimizer(state, torch.optim.AdamW(model.parameters()), SOURCE)
    with pytest.raises(ConfigError, match=r"over 2 parameters; that of the config has .* over 1"):
        restore_optimizer(state, torch.optim.SGD([model.weight]), SOURCE)
    two = torch.optim.SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(1))]}])
    with pytest.raises(ConfigError, match=r"has an optimizer with 1 parameter groups; that of the config has 2"):
        restore_optimizer(state, two, SOURCE)
