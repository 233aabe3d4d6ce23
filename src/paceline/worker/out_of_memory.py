"""What to lower when a device has no memory left, with the numbers that torch reports."""

from __future__ import annotations

import re
from typing import Any

import torch

from paceline.config import Config
from paceline.config.written import written

SIZE = r"([\d.]+ [KMGT]?i?B)"
GPU = re.compile(rf"Tried to allocate {SIZE}\. GPU (\d+) has a total capacity of {SIZE} of which {SIZE} is free")
OTHERS = re.compile(rf"Process \d+ has {SIZE} memory in use")
OWN = re.compile(rf"this process has {SIZE} memory in use")
HOST = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate memory, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and HOST.search(str(error)) is not None
    )


def memory_advice(text: str, config: Config, *, is_evaluating: bool = False) -> str:
    """The sentence for torch's text: what was needed, what there is, and which keys to lower (pure)."""
    return f"{_numbers(text)}; {_advice(config, is_evaluating=is_evaluating)}"


def _numbers(text: str) -> str:
    if (host := HOST.search(text)) is not None:
        return f"the host has no memory for {int(host[1]) / 2**30:,.1f} GiB more"
    found = GPU.search(text)
    if found is None:
        return "the GPU has no memory left"
    needed, number, total, free = found.groups()
    own, others = OWN.search(text), OTHERS.findall(text)
    used = [f"{own[1]} are used by this process"] if own is not None else []
    used += [f"{' and '.join(others)} by others"] if others else []
    there = ", ".join([f"{free} of {total} are free", *used])
    return f"GPU {number} has no memory for {needed} more ({there})"


def _advice(config: Config, *, is_evaluating: bool) -> str:
    """What to change, in the words of where the config was typed."""

    def words(**settings: Any) -> str:
        return written(settings, config.origin.place)

    of_evaluation = config.evaluate.batch_size if is_evaluating else None
    if of_evaluation is not None and of_evaluation > 1:
        return f"set {words(evaluate={'batch_size': of_evaluation // 2})} instead of {of_evaluation}"
    size, half = config.batch_size, config.batch_size // 2
    ways = []
    if half and config.global_batch_size is not None and config.global_batch_size % half == 0:
        ways.append(f"set {words(batch_size=half)} instead of {size}; lanes follow from global_batch_size")
    elif half and config.keeps_state and config.lanes is not None and 2 * half == size:
        now, steps = f"{size} and {config.lanes}", f"steps of {size * config.lanes} samples"
        ways.append(f"set {words(batch_size=half, lanes=2 * config.lanes)} instead of {now}, which keeps {steps}")
    elif half:
        ways.append(f"set {words(batch_size=half)} instead of {size}")
    if config.precision == "fp32" and config.train_fn is None:
        ways.append(f"set {words(precision='bf16')}")
    return ", or ".join(ways) if ways else "use a smaller model, or a GPU with more memory"
