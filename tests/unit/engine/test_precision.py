from __future__ import annotations

import pytest
import torch

from paceline.data.trees import to_channels_last
from paceline.engine.precision import autocast, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_precision_that_is_named_stays(precision: str) -> None:
    assert resolve_precision(precision, CPU) == resolve_precision(precision, GPU) == precision


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_gpu_has_it(has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    assert resolve_precision("auto", GPU) == expected
    assert resolve_precision("auto", CPU) == "fp32"


def test_auto_on_a_cpu_leaves_numbers_as_they_are() -> None:
    with autocast("auto", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with autocast("bf16", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_only_images_of_a_batch_are_laid_out() -> None:
    images, labels, videos = (
        torch.randn(2, 3, 4, 5),
        torch.zeros(2, 3, 4, 5, dtype=torch.long),
        torch.randn(1, 2, 3, 4, 5),
    )
    batch = to_channels_last(({"x": images, "y": labels}, [videos, "name"]))
    assert batch[0]["x"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[0]["x"], images)
    assert batch[0]["y"] is labels
    assert batch[1] == [videos, "name"]
    assert type(batch) is tuple
