"""The numbers and the advice in a message about a lack of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import build
from paceline.worker.out_of_memory import is_out_of_memory, memory_advice
from support.configs import MANAGED, OWN

# Texts of torch 2.13.
ON_GPU = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 1 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 78.60 GiB memory in use. Of the allocated memory 77.00 GiB "
    "is allocated by PyTorch, and 385.33 MiB is reserved by PyTorch but unallocated."
)
ON_HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
NUMBERS = (
    "GPU 1 has no memory for 1.50 GiB more (512.00 MiB of 79.11 GiB are free, 78.60 GiB are used by this process); "
)


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({"batch_size": 64, "lanes": 2},
         "set batch_size=32, lanes=4 instead of 64 and 2, which keeps steps of 128 samples"),
        ({"batch_size": 64, "global_batch_size": 128},
         "set batch_size=32 instead of 64; lanes follow from global_batch_size"),
        ({"batch_size": 5, "lanes": 2}, "set batch_size=2 instead of 5"),
        ({"batch_size": 5, "lanes": 2, "precision": "fp32"}, 'set batch_size=2 instead of 5, or set precision="bf16"'),
        ({"batch_size": 1, "lanes": 2}, "use a smaller model, or a GPU with more memory"),
        ({**OWN, "loss_fn": None, "batch_size": 64}, "set batch_size=32 instead of 64"),
    ],
)  # fmt: skip
def test_the_advice_follows_from_the_config(keys: dict[str, Any], advice: str) -> None:
    assert memory_advice(ON_GPU, build({**MANAGED, **keys})) == NUMBERS + advice


def test_an_evaluation_has_a_batch_size_of_its_own() -> None:
    config = build({**MANAGED, "evaluate": {"batch_size": 256}})
    assert memory_advice(ON_GPU, config, is_evaluating=True) == (
        NUMBERS + 'set evaluate={"batch_size": 128} instead of 256'
    )
    assert "set batch_size=16 instead of 32" in memory_advice(ON_GPU, config)


def test_the_memory_of_the_host_and_texts_without_numbers() -> None:
    config = build({**MANAGED})
    assert memory_advice(ON_HOST, config).startswith("the host has no memory for 4.0 GiB more; set batch_size=16 ")
    assert memory_advice("CUDA error: out of memory", config).startswith(
        "the GPU has no memory left; set batch_size=16 "
    )


def test_which_errors_are_a_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(ON_GPU))
    assert is_out_of_memory(RuntimeError(ON_HOST))
    assert not is_out_of_memory(RuntimeError("not today"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
