"""compile_gain.py: when compiling a step earns its time back."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.compile_gain import LEAST_SAVED_S, MARGIN, ForwardWork, WorkCounter, gain_of

# Counted with WorkCounter under autocast in bf16.
GPT2 = ForwardWork(98_214_000_000, 337)  # 124 M parameters, 32 × 1,024 tokens
RESNET50 = ForwardWork(30_989_000_000, 340)  # 256 images
MLP = ForwardWork(2_000_000, 11)  # of `paceline bench`
CNN = ForwardWork(191_000_000, 87)  # of `paceline bench`, 10 blocks


@pytest.mark.parametrize(
    ("work", "measured_ms"), [pytest.param(GPT2, 145 - 97, id="GPT-2"), pytest.param(RESNET50, 53 - 37, id="ResNet-50")]
)
def test_the_estimate_agrees_with_what_was_measured(work: ForwardWork, measured_ms: float) -> None:
    assert gain_of(work, steps=1).saved_s_per_step * 1e3 == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(
    ("work", "steps", "is_clear"),
    [
        (GPT2, 1_000, False), (GPT2, 3_000, True), (RESNET50, 5_000, False), (RESNET50, 8_000, True),
        (MLP, 10_000_000, False), (CNN, 10_000_000, False),
    ],
)  # fmt: skip
def test_long_runs_of_large_models_are_compiled(work: ForwardWork, steps: int, is_clear: bool) -> None:
    assert gain_of(work, steps).is_clear == is_clear


def test_the_estimated_time_to_compile_agrees_with_what_was_measured() -> None:
    assert gain_of(GPT2, steps=1).compile_s == pytest.approx(50, rel=0.05)


def test_the_run_must_save_twice_what_compiling_costs() -> None:
    gain = gain_of(GPT2, steps=1)
    steps = int(MARGIN * gain.compile_s / gain.saved_s_per_step)
    assert not gain_of(GPT2, steps).is_clear
    assert gain_of(GPT2, steps + 1).is_clear


def test_short_steps_are_never_compiled() -> None:
    work = ForwardWork(int(LEAST_SAVED_S / 0.5e-12) - 1, 1)
    assert not gain_of(work, steps=10**9).is_clear
    assert gain_of(work._replace(traffic_bytes=work.traffic_bytes + 2), steps=10**9).is_clear


def test_what_operators_read_and_write_is_counted_but_not_that_of_products() -> None:
    x, square = torch.ones(8), torch.ones(8, 8)
    with WorkCounter() as counter:
        x + x
    assert counter.work == ForwardWork(3 * 8 * 4, 1)
    with WorkCounter() as counter:
        square @ square
        square.view(64)
        torch.nn.functional.conv1d(square[None], square[:, :, None])
    assert counter.work.traffic_bytes == 0
    with WorkCounter() as counter:
        square.sum()
    assert counter.work == ForwardWork(65 * 4, 1)


def test_the_work_does_not_depend_on_values_or_on_the_count_before() -> None:
    counts = []
    for scale in (1.0, 100.0):
        with WorkCounter() as counter:
            torch.nn.functional.cross_entropy(scale * torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
        counts.append(counter.work)
    assert counts[0] == counts[1]
