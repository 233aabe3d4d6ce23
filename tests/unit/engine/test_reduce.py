"""The tree: which sums complete when, and that skipping empty lanes changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.reduce import LaneSum, Reduction, merges_after, reduce_after_backward
from support.worlds import world_of


def shape_of(merges: list[int]) -> str:
    """The sum as it is bracketed."""
    branches: list[str] = []
    for lane, count in enumerate(merges):
        branches.append(str(lane))
        for _ in range(count):
            right, left = branches.pop(), branches.pop()
            branches.append(f"({left}+{right})")
    (whole,) = branches
    return whole


@pytest.mark.parametrize(
    ("lanes", "shape"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+2)+((3+4)+5))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_the_tree_halves_its_lanes(lanes: int, shape: str) -> None:
    assert shape_of(merges_after(lanes)) == shape


@given(st.integers(1, 64), st.integers(0, 6))
def test_the_lanes_of_a_rank_are_a_branch_of_the_tree(per_rank: int, levels: int) -> None:
    """Two ranks' branches of the same shape make the branch of one rank with twice the lanes."""
    half, whole = merges_after(per_rank), merges_after(2 * per_rank)
    assert whole == [*half, *half[:-1], half[-1] + 1]


@given(st.lists(st.booleans(), min_size=1, max_size=16).filter(any))
def test_any_division_into_ranks_gives_the_same_bits_with_empty_lanes_too(is_ridden: list[bool]) -> None:
    lanes = 1 << (len(is_ridden) - 1).bit_length()
    is_ridden += [False] * (lanes - len(is_ridden))
    values = torch.randn(lanes, 7, generator=torch.Generator().manual_seed(len(is_ridden)))

    def branch(first: int, last: int) -> torch.Tensor:
        """The tensor that a rank with these lanes sends: the identity of addition if all are empty."""
        run_lanes = [lane for lane in range(first, last) if is_ridden[lane]]
        lane_sum = LaneSum(last - first)
        for lane in run_lanes[:-1]:
            lane_sum.add(lane - first, [values[lane].clone()])
        if not run_lanes:
            return torch.full((7,), -0.0)
        total = values[run_lanes[-1]].clone()
        for part in lane_sum.remaining(run_lanes[-1] - first):
            total += part[0]
        return total

    ranks, whole = 1, branch(0, lanes)
    while ranks < lanes:
        ranks *= 2
        parts = [branch(r * lanes // ranks, (r + 1) * lanes // ranks) for r in range(ranks)]
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        assert torch.equal(parts[0].view(torch.int32), whole.view(torch.int32))


def test_a_lane_sum_keeps_few_copies() -> None:
    lane_sum, most = LaneSum(64), 0
    for lane in range(63):
        lane_sum.add(lane, [torch.ones(1)])
        most = max(most, len(lane_sum._branches))
    assert most == 6
    assert LaneSum(1).remaining(0) == []


def test_a_single_rank_reduces_nothing() -> None:
    world = world_of()
    tensor = torch.randn(3)
    assert Reduction(world, exact=True).start(tensor).wait() is tensor


# --- compression --------------------------------------------------------------------------------------------


class Pair(Reduction):
    """Sums with a partner that holds the same, without a process group."""

    def _start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self.sent = tensor.dtype
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tensor.add_(tensor.clone()))
        return done


def pair(compression: str) -> Pair:
    world = world_of(size=2)
    return Pair(world, exact=False, compression=compression)


@pytest.mark.parametrize(("compression", "sent"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_compressed_sums_travel_in_half_the_bytes_and_land_in_their_tensor(compression: str, sent: torch.dtype) -> None:
    reduction, tensor = pair(compression), torch.tensor([1.0, 1 / 3, -0.0])
    assert reduction.start(tensor).wait() is tensor
    assert reduction.sent == sent
    assert tensor.tolist() == [2.0, 2 * torch.tensor(1 / 3).to(sent).item(), 0.0]
    assert torch.signbit(tensor[2])


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_the_nan_flag_survives_compression(compression: str) -> None:
    tensor = torch.tensor([math.nan, 1.0, math.inf])
    pair(compression).start(tensor).wait()
    assert tensor.isfinite().tolist() == [False, True, False]


def test_other_formats_are_not_compressed() -> None:
    reduction, tensor = pair("bf16"), torch.tensor([1 / 3], dtype=torch.float64)
    reduction.start(tensor).wait()
    assert reduction.sent == torch.float64


def test_a_single_rank_compresses_nothing() -> None:
    world = world_of()
    tensor = torch.tensor([1 / 3])
    assert Reduction(world, exact=False, compression="bf16").start(tensor).wait().item() == torch.tensor(1 / 3).item()
    assert Reduction(world, exact=False, compression="powersgd").compression == "none"


def test_sums_after_backward_have_the_strides_of_their_parameters() -> None:
    """A fused optimizer reads both in the order of memory."""
    world = world_of()
    like = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(like)
    [summed] = reduce_after_backward([gradient], [like], Reduction(world, exact=True), bucket_bytes=1e6)
    assert summed is not None
    assert summed.stride() == like.stride()
    assert torch.equal(summed, gradient)


def test_parameters_of_two_formats_are_added_up_each_in_its_own() -> None:
    here = world_of()
    like = [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(1)]
    summed = reduce_after_backward([torch.ones_like(one) for one in like], like, Reduction(here, True), 1e6)
    assert [part.dtype for part in summed if part is not None] == [one.dtype for one in like]
