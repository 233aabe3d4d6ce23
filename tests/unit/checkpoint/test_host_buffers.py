"""checkpoint/host_buffers.py: copies of a state that later steps do not change."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from paceline.checkpoint.files import split_into_files
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.state import CheckpointState


def test_later_steps_do_not_change_a_copy() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(1.0), "c": torch.zeros(0)}
    state = CheckpointState({"weights": tensors}, {})
    buffers, files = HostBuffers(), split_into_files(state)
    buffers.reserve(state, files)
    first = buffers.copy(state, files)
    tensors["a"] += 10
    tensors["b"] += 10
    copied = first()["weights.safetensors"]
    assert copied["a"].is_contiguous()
    assert torch.equal(copied["a"], torch.arange(6.0).reshape(2, 3).t())
    assert copied["b"] == 1.0
    assert torch.equal(buffers.copy(state, files)()["weights.safetensors"]["a"], tensors["a"])


def test_buffers_are_allocated_once_and_again_when_shapes_change() -> None:
    state = CheckpointState({"weights": {"w0": torch.zeros(8, dtype=torch.uint8)}}, {})
    buffers, files = HostBuffers(), split_into_files(state)
    buffers.reserve(state, files)
    addresses = [buffers.copy(state, files)()["weights.safetensors"]["w0"].data_ptr() for _ in range(3)]
    assert len(set(addresses)) == 1
    state.groups["weights"]["w0"] = torch.ones(3, dtype=torch.int16)
    assert torch.equal(buffers.copy(state, files)()["weights.safetensors"]["w0"], torch.ones(3, dtype=torch.int16))


def test_reserving_buffers_starts_no_threads_of_torch() -> None:
    """More threads than cores would make every operation of the training thread wait for its threads to wake up."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    state = CheckpointState({"weights": {"large": torch.zeros(1 << 22)}}, {})
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.zeros(1 << 22).add_(1)  # starts the OpenMP threads of this thread
        before, during = threads(), []

        def reserve() -> None:
            HostBuffers().reserve(state, split_into_files(state))
            during.append(threads() - 1)  # without the worker thread itself

        worker = threading.Thread(target=reserve)
        worker.start()
        worker.join()
    finally:
        torch.set_num_threads(count)
    assert during == [before]
