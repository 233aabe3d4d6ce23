"""The loss without logits on a GPU: its kernel against torch's, the same bits twice, inside a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from paceline.engine import fused_loss
from paceline.engine.fused_loss import linear_cross_entropy, softmax_by_torch

CLASSES, FEATURES, TOKENS = 50_257, 64, 300


def problem(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(3)
    make = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(tokens, FEATURES, dtype=dtype, **make).requires_grad_()
    weight = (torch.randn(CLASSES, FEATURES, dtype=dtype, **make) / 8).requires_grad_()
    target = torch.randint(0, CLASSES, (tokens,), **make)
    target[::5] = -100
    target[1] = CLASSES - 1
    return hidden, weight, target


def loss_and_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, chunk: int = 128
) -> list[torch.Tensor]:
    loss = linear_cross_entropy(hidden, weight, target, chunk=chunk)
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, (hidden, weight))]


@pytest.fixture
def kernel() -> Any:
    pytest.importorskip("triton")
    return fused_loss._kernel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 100, 8192, 50_257])
def test_the_kernel_does_what_torch_does(kernel: Any, dtype: torch.dtype, classes: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    columns = -(-classes // 128) * 128
    logits = (torch.randn(33, columns, device="cuda", generator=generator) * 4).to(dtype)
    logits[7, : min(classes - 1, 9000)] = -torch.inf
    target = torch.randint(0, classes, (33,), device="cuda", generator=generator)
    target[3], target[4], target[7] = -100, classes, classes - 1
    found = []
    for settle in (softmax_by_torch, kernel):
        gradients, losses = logits.clone(), torch.empty(33, device="cuda")
        settle(gradients, target, losses, classes, -100, True)
        found.append((losses, gradients.float()))
    (losses, gradients), (losses_of_kernel, gradients_of_kernel) = found
    assert losses_of_kernel[3] == 0
    assert losses_of_kernel[4].isnan()
    assert not gradients_of_kernel[3].any()
    assert not gradients_of_kernel[:, classes:].any()
    torch.testing.assert_close(losses_of_kernel, losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    one_rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(gradients_of_kernel, gradients, rtol=one_rounding, atol=1e-6)


def test_without_gradients_the_kernel_leaves_the_logits_alone(kernel: Any) -> None:
    logits, losses = torch.randn(3, 256, device="cuda"), torch.empty(3, device="cuda")
    before = logits.clone()
    kernel(logits, torch.tensor([0, 5, 200], device="cuda"), losses, 201, -100, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(
        losses, cross_entropy(before[:, :201], torch.tensor([0, 5, 200], device="cuda"), reduction="none")
    )


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("chunk", [128, 10_000])
def test_loss_and_gradients_are_those_of_the_logits(
    chunk: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "_has_triton", lambda: has_kernel)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    hidden, weight, target = problem()
    loss = cross_entropy(hidden @ weight.T, target)
    expected = [loss.detach(), *torch.autograd.grad(loss * 0.5, (hidden, weight))]
    torch.testing.assert_close(loss_and_gradients(hidden, weight, target, chunk), expected, rtol=1e-4, atol=1e-6)


def test_under_autocast_it_is_as_near_to_the_truth_as_the_logits_are() -> None:
    hidden, weight, target = problem()
    doubles = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    truth = cross_entropy(doubles[0] @ doubles[1].T, target)
    exact = [truth.detach(), *torch.autograd.grad(truth * 0.5, doubles)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with_logits = cross_entropy(torch.nn.functional.linear(hidden, weight), target)
        fused = loss_and_gradients(hidden, weight, target)
    theirs = [with_logits.detach(), *torch.autograd.grad(with_logits * 0.5, (hidden, weight))]
    assert [one.dtype for one in fused] == [torch.float32] * 3
    for ours, other, right in zip(fused, theirs, exact, strict=True):
        assert (ours - right).norm() <= 1.2 * (other - right).norm() + 1e-3 * right.norm()


def test_weights_of_16_bits_are_added_up_in_32() -> None:
    assert fused_loss._adds_in_32_bits(torch.device("cuda", 0), torch.bfloat16)


def test_the_same_bits_twice_with_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            first, second = (loss_and_gradients(*problem()) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


def test_it_can_be_recorded_in_a_graph_and_replayed_on_other_data() -> None:
    hidden, weight, target = problem()

    def work() -> list[torch.Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss_and_gradients(hidden, weight, target)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        recorded = work()
    with torch.no_grad():
        hidden.mul_(0.5)
        target.copy_(target.roll(1))
    graph.replay()
    replayed = [one.clone() for one in recorded]
    assert all(map(torch.equal, replayed, work()))


def test_the_logits_are_never_all_there() -> None:
    hidden, weight, target = problem(tokens=8192)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss_and_gradients(hidden, weight, target, chunk=512)
    assert torch.cuda.max_memory_allocated() - before < 8192 * CLASSES * 2 / 2  # half of the logits in bf16
