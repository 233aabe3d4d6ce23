"""What compiling a step costs and saves: an estimate from the model, a batch, the number of steps and the device alone.

Compiled code rounds differently, so all runs of a config must take the same decision: nothing here depends on the clock
or on the number of ranks. Compiled kernels are faster because they fuse operators that would each read and write all
their numbers; products, convolutions and attention stay as they are. So the traffic of all other operators is counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Types of devices on which compiling may be worth it. The constants below have been measured on a GPU only.
DEVICES = ("cuda",)
# Times of one H200 in bf16: GPT-2 with 32 × 1,024 tokens took 97 instead of 145 ms per step after 50 s, ResNet-50 with
# 256 images 37 instead of 53 ms. Counted without a GPU, under autocast of a CPU: 98 GB and 337 operators, and 31 GB.
# That is 0.49 and 0.52 ms per GB. GPUs with slower memory save more.
SAVED_S_PER_BYTE = 0.5e-12
COMPILE_S_PER_OPERATOR = 0.15
MARGIN = 2.0  # the run must save this many times what compiling costs
LEAST_SAVED_S = 1e-3  # per step: shorter steps are limited by the start of kernels, which CUDA graphs avoid already


class ForwardWork(NamedTuple):
    """The work of one forward pass that compiling changes."""

    traffic_bytes: int  # read and written by operators other than products
    operators: int


class Gain(NamedTuple):
    """The seconds that compiling costs, and those that it saves in each step."""

    compile_s: float
    saved_s_per_step: float
    steps: int

    @property
    def saved_s(self) -> float:
        """The seconds that the whole run saves, without the cost."""
        return self.saved_s_per_step * self.steps

    @property
    def is_clear(self) -> bool:
        """Whether the estimate is clearly in favour of compiling."""
        return self.saved_s_per_step >= LEAST_SAVED_S and self.saved_s >= MARGIN * self.compile_s


def gain_of(work: ForwardWork, steps: int) -> Gain:
    """The estimated gain of compiling a step with this work in each lane, in a run of `steps` steps (pure).

    A step counts as one lane, as on as many ranks as lanes: fewer ranks save more.
    """
    return Gain(COMPILE_S_PER_OPERATOR * work.operators, SAVED_S_PER_BYTE * work.traffic_bytes, steps)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of the operators that run inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = ForwardWork(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator."""
        output = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) != "aten" or func.is_view:
            return output
        is_product = func.overloadpacket in flop_registry
        traffic = 0 if is_product else sum(map(_bytes_of, tree_leaves((args, kwargs, output))))
        self.work = ForwardWork(self.work.traffic_bytes + traffic, self.work.operators + 1)
        return output


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
