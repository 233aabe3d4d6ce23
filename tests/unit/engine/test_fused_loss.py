"""The loss of a linear layer without its logits: the same loss and gradients as with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import paceline
from paceline.engine import fused_loss
from paceline.engine.fused_loss import linear_cross_entropy

# Some virtual machines promise matrix instructions of 16 bits that they do not have.
without_onednn = pytest.mark.usefixtures("_without_onednn")

CLASSES, FEATURES = 201, 8  # 201 is odd, and padded to 256


class Problem:
    """A layer and tokens, some of which do not count."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float64, classes: int = CLASSES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(*shape, FEATURES, generator=generator, dtype=dtype).requires_grad_()
        self.weight = torch.randn(classes, FEATURES, generator=generator, dtype=dtype).requires_grad_()
        self.target = torch.randint(0, classes, shape, generator=generator)
        self.target.view(-1)[::4] = -100

    def by_torch(self, factor: float = 1.0, **options: Any) -> list[torch.Tensor]:
        logits = torch.nn.functional.linear(self.hidden, self.weight).flatten(0, -2)
        return self._with_gradients(cross_entropy(logits, self.target.flatten(), **options), factor)

    def fused(self, factor: float = 1.0, **options: Any) -> list[torch.Tensor]:
        return self._with_gradients(linear_cross_entropy(self.hidden, self.weight, self.target, **options), factor)

    def _with_gradients(self, loss: torch.Tensor, factor: float) -> list[torch.Tensor]:
        wanted = [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss * factor, wanted)]


@pytest.fixture
def _without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def test_it_is_public() -> None:
    assert paceline.linear_cross_entropy is linear_cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])  # of 30 tokens
def test_loss_and_gradients_are_those_of_the_logits(chunk: int, reduction: str) -> None:
    problem = Problem(5, 6)
    torch.testing.assert_close(
        problem.fused(factor=0.3, chunk=chunk, reduction=reduction), problem.by_torch(factor=0.3, reduction=reduction)
    )


@pytest.mark.parametrize("classes", [1, 3, 128, 129])
def test_any_number_of_classes(classes: int) -> None:
    problem = Problem(9, dtype=torch.float32, classes=classes)
    torch.testing.assert_close(problem.fused(chunk=4), problem.by_torch(), rtol=1e-5, atol=1e-6)


def test_another_index_may_be_ignored() -> None:
    problem = Problem(12)
    problem.target.clamp_(min=0)
    assert (problem.target == 0).any()
    torch.testing.assert_close(problem.fused(ignore_index=0), problem.by_torch(ignore_index=0))


@without_onednn
def test_under_autocast_it_is_as_near_to_the_truth_as_the_logits_are() -> None:
    problem = Problem(4, 16, dtype=torch.float32)
    truth = problem.by_torch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, with_logits = problem.fused(chunk=24), problem.by_torch()
    assert [one.dtype for one in fused] == [torch.float32] * 3
    assert (fused[1] - truth[1]).norm() > 1e-4 * truth[1].norm()  # else it has not been cast
    for ours, theirs, exact in zip(fused, with_logits, truth, strict=True):
        assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() + 1e-3 * exact.norm()


@without_onednn
def test_weights_of_16_bits_get_gradients_of_16_bits() -> None:
    problem = Problem(20, dtype=torch.bfloat16)
    loss, *gradients = problem.fused(chunk=8)
    assert [loss.dtype, *(one.dtype for one in gradients)] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(loss, problem.by_torch()[0].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    problem = Problem(10)
    getattr(problem, frozen).requires_grad_(False)
    fused = problem.fused()
    assert len(fused) == 2
    torch.testing.assert_close(fused, problem.by_torch())


def test_without_gradients_it_is_a_number_and_costs_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fused_loss, "_add_product")
    problem = Problem(10)
    with torch.no_grad():
        loss = linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, problem.by_torch()[0])


def test_nothing_is_read_that_was_not_written() -> None:
    problem = Problem(10)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        fused = problem.fused(chunk=4)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(fused, problem.by_torch())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_no_token_counts_it_is_as_in_torch(reduction: str) -> None:
    problem = Problem(6)
    problem.target.fill_(-100)
    fused = problem.fused(reduction=reduction)
    assert bool(fused[0].isnan()) == (reduction == "mean")
    torch.testing.assert_close(fused, problem.by_torch(reduction=reduction), equal_nan=True)


def test_no_tokens_at_all_are_a_sum_of_nothing() -> None:
    loss, for_hidden, for_weight = Problem(2, 0).fused(reduction="sum")
    assert loss == 0
    assert for_hidden.shape == (2, 0, FEATURES)
    assert not for_weight.any()


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_target_that_is_no_class_makes_the_loss_nan(label: int) -> None:
    problem = Problem(6)
    problem.target[3] = label
    assert problem.fused()[0].isnan()


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    problem = Problem(6)
    loss = linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    [first] = torch.autograd.grad(3 * loss, problem.weight, retain_graph=True)
    [second] = torch.autograd.grad(3 * loss, problem.weight)
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused() -> None:
    problem = Problem(6)
    loss = linear_cross_entropy(problem.hidden, problem.weight, problem.target)
    [gradient] = torch.autograd.grad(loss, problem.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_it_is_one_operator_of_a_compiled_function() -> None:
    problem = Problem(6)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_fn(hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = linear_cross_entropy(hidden * 2, problem.weight, target, reduction="sum")
        return total, (target != -100).sum()

    total, count = loss_fn(problem.hidden, problem.target)
    expected = linear_cross_entropy(problem.hidden * 2, problem.weight, problem.target, reduction="sum")
    assert torch.equal(total, expected)
    assert count == 4
    wanted = [problem.hidden, problem.weight]
    assert all(map(torch.equal, torch.autograd.grad(total, wanted), torch.autograd.grad(expected, wanted)))


@pytest.mark.parametrize("wanted", [(True, True), (False, False)])
def test_the_fake_operator_has_the_shapes_of_the_real_one(wanted: tuple[bool, bool]) -> None:
    problem = Problem(6)
    inputs = problem.hidden, problem.weight, problem.target, -100, 4, torch.float64, *wanted
    torch.library.opcheck(fused_loss._op, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((4, 8), (9, 7), (4,)), {}, r"hidden \(4, 8\), weight \(9, 7\)"),
        (((4, 8), (9, 8), (5,)), {}, r"target \(5,\) do not fit"),
        (((4, 8), (9, 8), (4,)), {"reduction": "none"}, "reduction='none' is not known"),
        (((4, 8), (9, 8), (4,)), {"chunk": 0}, "chunk=0 is too small"),
    ],
)
def test_mistakes_are_named(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], message: str) -> None:
    hidden, weight, target = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, target.long(), **options)
