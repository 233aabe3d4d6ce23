"""Gradients of one rank in buckets, with a reduction that has not finished yet."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from weakref import ref

import torch

from paceline.engine.buckets import GradientSums
from paceline.engine.integer_sum import Gradients
from paceline.engine.reduce import Future


class Unfinished:
    """Starts sums that read their lanes later, as a stream of a GPU does."""

    world, uses_integers, bucket_bytes = SimpleNamespace(size=2), True, 1.0

    def __init__(self) -> None:
        self.started: list[tuple[list[ref[torch.Tensor]], Future]] = []

    def start(self, sums: Gradients, lanes: Sequence[Gradients], buffer: torch.Tensor, *, is_empty: bool) -> Future:
        self.started.append(([ref(each) for lane in lanes for each in lane], torch.futures.Future()))
        return self.started[-1][1]


def test_what_is_sent_is_kept_until_the_sum_is_done() -> None:
    reduction = Unfinished()
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2)]
    sums = GradientSums(parameters, reduction)  # type: ignore[arg-type]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sums.add()
    sums.expect(is_empty=False, flag=None)
    for parameter in reversed(parameters):
        parameter.grad = torch.ones_like(parameter)
        sums.on_gradient(parameter)
    assert len(reduction.started) == 2  # a bucket for each
    for tensors, _ in reduction.started:
        assert len(tensors) == 4  # of two lanes, with the marks of used parameters
        assert all(tensor() is not None for tensor in tensors)
    for bucket, (_, future) in zip(sums._buckets, reduction.started, strict=True):
        future.set_result(bucket.buffer)
    sums.finish(is_empty=False, flag=None)
    sums.restart()
    assert all(tensor() is None for tensors, _ in reduction.started for tensor in tensors)
