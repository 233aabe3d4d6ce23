"""What one forward pass on copies shows, in a world of one. Collectives are tried in tests/multi."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.config import Config
from paceline.engine.digest import sha256_of
from paceline.engine.probe import Findings, probe_forward, uneven_warning
from paceline.errors import ConfigError
from support.models import RunningLoss
from support.worlds import world_of

MakeConfig = Callable[..., Config]
HERE = world_of()
MOMENTUM = 0.99


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])


# --- frozen parameters ----------------------------------------------------------------------------------------------


def in_place(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    ours.mul_(MOMENTUM).add_(theirs, alpha=1 - MOMENTUM)


def in_data(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    ours.data.mul_(MOMENTUM).add_(theirs.data, alpha=1 - MOMENTUM)


def as_new_data(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    ours.data = MOMENTUM * ours.data + (1 - MOMENTUM) * theirs.data


def as_a_copy(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    ours.copy_(theirs)


class Teacher(nn.Module):
    """A student, a teacher that begins as its copy and follows it, and a part that stays as it is."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student, self.follow = nn.Linear(3, 2), follow
        nn.init.zeros_(self.student.bias)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.backbone = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for pair in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.follow(*pair)
        output: torch.Tensor = self.student(self.backbone(x)) - self.teacher(x)
        return output


@pytest.mark.parametrize("follow", [in_place, in_data, as_new_data, as_a_copy])
def test_frozen_parameters_that_move_are_found_and_the_model_is_left_as_it_is(
    make_config: MakeConfig, follow: Callable[[nn.Parameter, nn.Parameter], None]
) -> None:
    model = Teacher(follow)
    before = sha256_of(model.state_dict())
    found = probe_forward(model, make_config(loss_fn=cross_entropy), batch(), 2, HERE)
    assert found.moving == {("teacher", "weight"), ("teacher", "bias")}
    assert sha256_of(model.state_dict()) == before


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        raise RuntimeError("not today")


def test_an_unknown_error_is_left_to_the_first_step(make_config: MakeConfig) -> None:
    assert probe_forward(Failing(3, 2), make_config(loss_fn=cross_entropy), batch(), 2, HERE) == Findings()


def test_a_mistake_is_found_on_all_ranks_before_the_first_step(make_config: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"the model \(Linear\) gets an input of shape \(4, 3\), but takes 5 features"
    ):
        probe_forward(nn.Linear(5, 2), make_config(loss_fn=cross_entropy), batch(), 2, HERE)


def test_what_cannot_be_copied_is_not_tried(make_config: MakeConfig) -> None:
    model = nn.Linear(3, 2)
    model.lane = (part for part in "not to be copied")
    assert probe_forward(model, make_config(loss_fn=cross_entropy), batch(), 2, HERE) == Findings()


class Penalised(nn.Module):
    """Computes a gradient in its forward pass, and moves a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        score = self.layer(x).square()
        [slope] = torch.autograd.grad(score.sum(), x, create_graph=True)
        self.seen.data = self.seen + slope.detach().mean(0)
        return score + slope.square().sum()


def test_a_model_that_computes_gradients_in_its_forward_pass_is_probed_as_others_are(make_config: MakeConfig) -> None:
    found = probe_forward(Penalised(), make_config(loss_fn=cross_entropy), batch(), 2, HERE)
    assert found == Findings(moving=frozenset({("", "seen")}))


def test_what_only_backward_needs_is_not_kept(make_config: MakeConfig) -> None:
    sizes: list[int] = []

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x).exp()
            with pytest.raises(RuntimeError, match="a gradient is computed in the forward pass"):
                found.sum().backward()
            sizes.append(found.numel())
            return found

    assert probe_forward(Watching(3, 2), make_config(loss_fn=cross_entropy), batch(), 2, HERE) == Findings()
    assert sizes == [2 * len(batch()[0])]


# --- losses ---------------------------------------------------------------------------------------------------------


class Counting:
    """A loss that falls with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(output, target) / self.calls


def in_a_closure() -> Any:
    mean = torch.tensor(1.0)

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        value = cross_entropy(output, target, reduction="sum")
        mean.lerp_(value.detach(), 0.1)
        return value / mean, len(target)

    return loss


def in_an_argument() -> Any:
    def loss(output: torch.Tensor, target: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        norm.train()(output.detach())
        return cross_entropy(norm.eval()(output), target)

    return partial(loss, norm=nn.BatchNorm1d(2))


@pytest.mark.parametrize("make_loss", [Counting, in_a_closure, in_an_argument])
@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_that_keeps_something_where_it_cannot_be_copied_is_refused(
    make_config: MakeConfig, make_loss: Callable[[], Any], exact: bool
) -> None:
    config = make_config(loss_fn=make_loss(), exact=exact)
    with pytest.raises(ConfigError, match=r"loss_fn gives another value .*; make it a torch.nn.Module and the state a"):
        probe_forward(nn.Linear(3, 2), config, batch(), 1, HERE)


class Noting:
    """Keeps a part of the loss, as for a log."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.last = output.abs().mean().item()
        self.calls = getattr(self, "calls", 0) + 1
        return cross_entropy(output, target)


def with_noise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output + torch.randn_like(output), target)


def writing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target[0] = 1 - target[0]
    return cross_entropy(output.mul_(2), target)


@pytest.mark.parametrize("loss", [RunningLoss(), Noting(), with_noise, writing, nn.CrossEntropyLoss(torch.ones(2))])
def test_other_losses_are_taken_and_left_as_they_are(make_config: MakeConfig, loss: Any) -> None:
    given = batch()
    assert probe_forward(nn.Linear(3, 2), make_config(loss_fn=loss), given, 2, HERE) == Findings()
    assert all(torch.equal(left, right) for left, right in zip(given, batch(), strict=True))
    assert getattr(loss, "mean", 1.0) == 1.0
    assert getattr(loss, "calls", 0) == 0


class Answer(OrderedDict[str, torch.Tensor]):
    """What models of a library return: a mapping with attributes."""

    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


def test_a_loss_may_take_what_only_its_library_makes(make_config: MakeConfig) -> None:
    class Answering(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Answer(logits=super().forward(x))

    counting = Counting()
    config = make_config(loss_fn=lambda output, target: counting(output.logits, target))
    with pytest.raises(ConfigError, match="loss_fn gives another value"):
        probe_forward(Answering(3, 2), config, batch(), 2, HERE)


class Following(nn.Module):
    """Has a teacher that moves in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) + self.teacher(x)


class WithConstants(nn.Linear):
    """Also returns numbers that belong to no gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        with torch.inference_mode():
            return found, torch.ones(2)


def cooling(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output /= 0.5
    return cross_entropy(output, target)


def writing_to_memory(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    array = target.numpy()
    array[:] = 1 - array
    output.data /= 0.5
    return cross_entropy(output, target)


def of_each_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda one, its: cross_entropy(one[None], its[None]))(output, target).mean()


@pytest.mark.parametrize("loss", [cooling, writing_to_memory, of_each_sample])
def test_losses_that_write_to_their_arguments_or_use_vmap_are_taken(make_config: MakeConfig, loss: Any) -> None:
    assert probe_forward(Following(), make_config(loss_fn=loss), batch(), 2, HERE).problem is None


def test_state_of_a_loss_is_found_beside_outputs_of_inference_mode(make_config: MakeConfig) -> None:
    counting = Counting()
    config = make_config(loss_fn=lambda output, target: counting(output[0], target))
    with pytest.raises(ConfigError, match="loss_fn gives another value"):
        probe_forward(WithConstants(3, 2), config, batch(), 2, HERE)


class Late(nn.Module):
    """Creates a buffer in the first forward pass."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.layer, self.changes = nn.Linear(3, 2), changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(2))
        if self.changes:
            self.late.add_(found.detach().mean(0))
        return found + self.late


def test_a_buffer_that_is_created_late_and_changes_is_refused(make_config: MakeConfig) -> None:
    for lanes, changes in ((4, False), (1, True)):
        config = make_config(loss_fn=cross_entropy, lanes=lanes)
        assert probe_forward(Late(changes), config, batch(), lanes, HERE) == Findings()
    with pytest.raises(ConfigError, match="the model creates late in its first forward pass and changes it"):
        probe_forward(Late(True), make_config(loss_fn=cross_entropy, lanes=4), batch(), 4, HERE)


# --- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "is_reported"), [(24, False), (25, True), (23, True), (None, True)])
def test_a_short_last_step_is_reported_where_there_is_one(
    make_config: MakeConfig, samples: int | None, is_reported: bool
) -> None:
    text = uneven_warning("allgather (net.py:3)", samples, make_config(batch_size=3), 4)
    assert (text is not None) is is_reported
    assert text is None or "calls allgather (net.py:3)" in text
    assert text is None or "a number of samples that 12 divides" in text
