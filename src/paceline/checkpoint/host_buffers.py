"""Host memory into which a rank copies its part of a state, so that training continues while files are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.checkpoint.files import TensorFile, transfers_to_writers
from paceline.checkpoint.state import CheckpointState, Tensors
from paceline.engine.sharding import Sharding, Transfer


class HostBuffers:
    """One buffer for each tensor that this rank copies; later saves use the same memory.

    With a sharded optimizer a rank copies the tensors that it owns, and sends them from there to the ranks that write.
    """

    def __init__(self, sharding: Sharding | None = None) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}  # by group and name
        self._sharding = sharding

    def reserve(self, state: CheckpointState, files: Sequence[TensorFile]) -> None:
        """Allocate the buffers and touch their pages, so that the first copy is as fast as later ones."""
        for group, name, tensor in self._tensors_to_hold(state, files, self._transfers(state)):
            # By NumPy: a multi-threaded torch operation in this thread makes libgomp count more threads than
            # there are cores, which delays every operation of the training thread until its threads wake up.
            self._buffer_for(group, name, tensor).reshape(-1).view(torch.uint8).numpy().fill(0)

    def copy(self, state: CheckpointState, files: Sequence[TensorFile]) -> Callable[[], dict[str, Tensors]]:
        """Start to copy the tensors of the files; return a function that waits and returns each file's tensors by name.

        With a sharded optimizer, all ranks must call that function.
        """
        sources, targets, transfers = [], [], self._transfers(state)
        for group, name, tensor in self._tensors_to_hold(state, files, transfers):
            buffer = self._buffer_for(group, name, tensor)
            if not tensor.is_meta:
                sources.append(tensor.detach())
                targets.append(buffer)
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        copied = [_record_event(device) for device in {tensor.device for tensor in sources} if device.type == "cuda"]

        def wait() -> dict[str, Tensors]:
            for event in copied:
                event.synchronize()
            if self._sharding is not None:
                optimizer = {name: buffer for (group, name), buffer in self._buffers.items() if group == "optimizer"}
                self._sharding.transfer(transfers, optimizer)
            return {file.name: {name: self._buffers[file.group, name] for name in file.tensor_names} for file in files}

        return wait

    def _transfers(self, state: CheckpointState) -> list[Transfer]:
        return transfers_to_writers(state, self._sharding.world.size) if self._sharding is not None else []

    def _tensors_to_hold(
        self, state: CheckpointState, files: Sequence[TensorFile], transfers: Sequence[Transfer]
    ) -> list[tuple[str, str, torch.Tensor]]:
        """Return group, name and tensor of all tensors that this rank writes, or sends to other ranks."""
        written = [(file.group, name) for file in files for name in file.tensor_names]
        rank = self._sharding.world.rank if self._sharding is not None else None
        sent = [("optimizer", transfer.name) for transfer in transfers if transfer.source == rank]
        return [(group, name, state.groups[group][name]) for group, name in [*written, *sent]]

    def _buffer_for(self, group: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of a tensor, allocated again if its shape or dtype has changed; pinned for a GPU."""
        buffer = self._buffers.get((group, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[group, name] = buffer
        return buffer


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Record an event on the device's current stream, behind the copies that are queued there."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
