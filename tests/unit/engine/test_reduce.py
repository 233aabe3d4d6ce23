"""Sums over the lanes of a rank, compression, and sums after backward; `test_integer_sum.py` has the rounding."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.engine.reduce import LaneGradients, Reduction, buckets_of, sum_after_backward
from support.worlds import fake_world, world_of


def test_lanes_of_which_only_the_sum_is_needed_are_added_in_place() -> None:
    added, kept = LaneGradients(keeps_each=False), LaneGradients(keeps_each=True)
    for lanes in (added, kept):
        for value in (1.0, 2.0, 4.0):
            lanes.add([torch.full((2,), value)])
    assert [lane[0].tolist() for lane in added.lanes] == [[7.0, 7.0]]
    assert [lane[0].tolist() for lane in kept.lanes] == [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize(("lanes", "exact", "rounds"), [(1, True, False), (2, True, False), (3, True, True)])
def test_two_lanes_have_one_order_and_need_no_integers(lanes: int, exact: bool, rounds: bool) -> None:
    assert Reduction(world_of(), lanes, exact=exact).uses_integers is rounds
    assert not Reduction(world_of(), lanes, exact=False).uses_integers


@pytest.mark.parametrize("exact", [False, True])
def test_the_lanes_of_a_single_rank_are_summed(exact: bool) -> None:
    buffer = torch.tensor([1.0, -2.0, 0.5])
    lanes = [[torch.tensor([8.0]), torch.tensor([4.0, 2.0])]]
    summed = Reduction(world_of(), 3, exact=exact).start([buffer[:1], buffer[1:]], lanes, buffer, is_empty=False)
    assert summed.wait() is buffer
    assert buffer.tolist() == [9.0, 2.0, 2.5]


@pytest.mark.parametrize("exact", [False, True])
def test_what_an_empty_lane_has_computed_is_not_added(exact: bool) -> None:
    buffer = torch.tensor([1e9, math.nan])
    Reduction(world_of(), 3, exact=exact).start([buffer], [[torch.tensor([0.5, -4.0])]], buffer, is_empty=True).wait()
    assert buffer.tolist() == [0.5, -4.0]


# --- compression --------------------------------------------------------------------------------------------


class Pair(Reduction):
    """Sums with a partner that holds the same, without a process group."""

    def _start_sum(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self.sent = tensor.dtype
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tensor.add_(tensor.clone()))
        return done


def sums(reduction: Reduction, tensor: torch.Tensor) -> torch.Tensor:
    return reduction.start([tensor], [], tensor, is_empty=False).wait()


def pair(compression: str) -> Pair:
    return Pair(fake_world(size=2), 2, exact=False, compression=compression)


@pytest.mark.parametrize(("compression", "sent"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_compressed_sums_travel_in_half_the_bytes_and_land_in_their_tensor(compression: str, sent: torch.dtype) -> None:
    reduction, tensor = pair(compression), torch.tensor([1.0, 1 / 3, -0.0])
    assert sums(reduction, tensor) is tensor
    assert reduction.sent == sent
    assert tensor.tolist() == [2.0, 2 * torch.tensor(1 / 3).to(sent).item(), 0.0]
    assert torch.signbit(tensor[2])


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_the_nan_flag_survives_compression(compression: str) -> None:
    tensor = torch.tensor([math.nan, 1.0, math.inf])
    sums(pair(compression), tensor)
    assert tensor.isfinite().tolist() == [False, True, False]


def test_other_formats_are_not_compressed() -> None:
    reduction, tensor = pair("bf16"), torch.tensor([1 / 3], dtype=torch.float64)
    sums(reduction, tensor)
    assert reduction.sent == torch.float64


def test_a_single_rank_compresses_nothing() -> None:
    world = world_of()
    tensor = torch.tensor([1 / 3])
    assert sums(Reduction(world, 2, exact=False, compression="bf16"), tensor).item() == torch.tensor(1 / 3).item()
    assert Reduction(world, 2, exact=False, compression="powersgd").compression == "none"


def test_sums_after_backward_have_the_strides_of_their_parameters() -> None:
    """A fused optimizer reads both in the order of memory."""
    world = world_of()
    like = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(like)
    [summed] = sum_after_backward([[gradient]], [True], [like], Reduction(world, 3, exact=True))
    assert summed is not None
    assert summed.stride() == like.stride()
    torch.testing.assert_close(summed, gradient, rtol=2**-23, atol=2**-27)


def test_parameters_of_two_formats_are_added_up_each_in_its_own() -> None:
    here = world_of()
    like = [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(1)]
    ones = [torch.ones_like(one) for one in like]
    summed = sum_after_backward([ones], [True] * 3, like, Reduction(here, 3, exact=True))
    assert [part.dtype for part in summed if part is not None] == [one.dtype for one in like]


def test_a_bucket_of_ddp_is_summed_at_once_and_larger_ones_in_parts() -> None:
    """DDP closes a bucket with the tensor that reaches the limit, so it is larger than that."""
    small, large = torch.zeros(10), torch.zeros(1000)
    assert list(buckets_of(range(3), [small, small, large], 2000.0)) == [[0, 1, 2]]
    assert list(buckets_of(range(5), [small, large, large, small, small], 2000.0)) == [[0, 1], [2], [3, 4]]
    mixed = [small, large.double(), small, large]
    assert list(buckets_of(range(4), mixed, 2000.0)) == [[0, 2, 3], [1]]
