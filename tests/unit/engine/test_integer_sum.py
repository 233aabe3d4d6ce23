"""Sums as integers: the same bits for every division of the lanes among ranks, and as accurate as sums of floats."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.flat import is_dense
from paceline.engine.integer_sum import BLOCK, Gradients, IntegerSum, Scratch

SHAPES = [(3, 100), (), (BLOCK,), (5, 2, 3, 3), (0,), (1000,)]


def gradients_of(seed: int, dtype: torch.dtype = torch.float32) -> Gradients:
    """Gradients of one lane, whose magnitudes differ from lane to lane and from tensor to tensor."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (len(SHAPES),), generator=generator).tolist()
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponent).to(dtype)
        for shape, exponent in zip(SHAPES, exponents, strict=True)
    ]


def summed(of_ranks: list[list[Gradients]], lanes: int) -> Gradients:
    """What every rank has after the exchange, computed in one process."""
    like = next(lane for of_rank in of_ranks for lane in of_rank)
    sums = [IntegerSum(like, lanes, Scratch()) for _ in of_ranks]
    exponents = torch.stack([each.exponents(mine) for each, mine in zip(sums, of_ranks, strict=True)]).amax(0)
    integers = [each.integers(mine, exponents).clone() for each, mine in zip(sums, of_ranks, strict=True)]
    results = []
    for each in sums:
        each._integers.copy_(torch.stack(integers).sum(0))
        results.append([torch.empty_like(tensor) for tensor in like])
        each.write(results[-1])
    assert all(bits_of(result) == bits_of(results[0]) for result in results)
    return results[0]


def bits_of(gradients: Gradients) -> list[bytes]:
    return [gradient.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for gradient in gradients]


def copies(lanes: list[Gradients]) -> list[Gradients]:
    return [[tensor.clone() for tensor in lane] for lane in lanes]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.data(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_division_into_any_ranks_in_any_order_gives_the_same_bits(
    lanes: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    of_lanes = [gradients_of(lane, dtype) for lane in range(lanes)]
    order = data.draw(st.permutations(range(lanes)))
    cuts = sorted(data.draw(st.lists(st.integers(0, lanes), max_size=5)))
    of_ranks = [[of_lanes[lane] for lane in order[a:b]] for a, b in itertools.pairwise([0, *cuts, lanes])]
    alone = summed([copies(of_lanes)], lanes)
    assert bits_of(summed([copies(mine) for mine in of_ranks], lanes)) == bits_of(alone)


@pytest.mark.parametrize("lanes", [3, 8, 64])
def test_the_error_is_that_of_one_rounding(lanes: int) -> None:
    of_lanes = [[torch.randn(4096, generator=torch.Generator().manual_seed(lane))] for lane in range(lanes)]
    exact = torch.stack([lane[0].double() for lane in of_lanes]).sum(0)
    plain = sum(lane[0] for lane in of_lanes)
    [ours] = summed([copies(of_lanes)], lanes)
    assert (ours - exact).norm() <= 1.05 * (plain - exact).norm()


@pytest.mark.parametrize("lanes", [3, 127, 128, 200])
@pytest.mark.parametrize("value", [1.0, 2 - 2**-23, 3e38, -3e38])
def test_the_largest_values_of_all_lanes_do_not_overflow(lanes: int, value: float) -> None:
    value /= lanes
    [total] = summed([[[torch.full((BLOCK,), value)] for _ in range(lanes)]], lanes)
    assert total.double().div(torch.tensor(value).double() * lanes).sub(1).abs().max() < 1e-5


def test_inf_and_nan_reach_the_sum_of_every_rank() -> None:
    lanes = [gradients_of(lane) for lane in range(3)]
    lanes[1][2][7], lanes[2][5][999] = math.inf, math.nan
    total = summed([lanes[:1], lanes[1:2], lanes[2:]], 3)
    assert [bool(tensor.isfinite().all()) for tensor in total] == [True, True, False, True, True, False]
    assert total[5][: 3 * BLOCK].isfinite().all()


def test_rows_of_zeros_and_huge_outliers_leave_other_blocks_as_they_are() -> None:
    table = torch.zeros(50, BLOCK)
    table[3], table[7] = 1e-12, 1e25
    [total] = summed([[[table.clone()], [table.clone()], [torch.zeros_like(table)]]], 3)
    assert torch.equal(total[3], table[3] * 2)
    assert torch.equal(total[7], table[7] * 2)
    assert total.count_nonzero() == 2 * BLOCK


def test_the_smallest_numbers_are_multiples_of_the_smallest_normal_one() -> None:
    tiny = torch.full((BLOCK,), 2.0**-126)
    denormal = torch.full((BLOCK,), 2.0**-140)
    [total] = summed([[[torch.cat([tiny, denormal])] for _ in range(3)]], 3)
    assert torch.equal(total[:BLOCK], 3 * tiny)
    assert not total[BLOCK:].any()


def test_the_gradients_of_a_scaled_loss_are_those_of_the_loss_times_its_scale() -> None:
    """The scale of fp16 is a power of two."""
    lanes = [gradients_of(lane) for lane in range(4)]
    scaled = [[tensor * 2.0**16 for tensor in lane] for lane in lanes]
    plain = summed([copies(lanes)], 4)
    assert bits_of([tensor / 2.0**16 for tensor in summed([scaled], 4)]) == bits_of(plain)


def test_sums_have_the_strides_of_their_gradients_whatever_those_of_the_lanes() -> None:
    like = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    lanes = [[like.clone()], [like.contiguous()], [like.clone()]]
    other = [[lane[0].contiguous()] for lane in lanes]
    sums = IntegerSum([like], 3, Scratch())
    result = [torch.empty_like(like)]
    for of_lanes in (lanes, other):
        sums.integers(of_lanes, sums.exponents(of_lanes))
        sums.write(result)
        torch.testing.assert_close(result[0], 3 * like)


def test_memory_is_used_again_and_holds_nothing_of_the_sum_before() -> None:
    scratch, large, small = Scratch(), [torch.full((600,), 1e20)], [torch.full((300,), 1.0)]
    for like in (large, small):
        sums = IntegerSum(like, 3, scratch)
        sums.integers([like] * 3, sums.exponents([like] * 3))
        result = [torch.empty_like(like[0])]
        sums.write(result)
        assert torch.equal(result[0], 3 * like[0])
    assert [len(taken) for taken in scratch._taken.values()] == [1, 1]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(8, 20)[:, ::2], False),
        (torch.zeros(3).expand(2, 3), False),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(4, 1, 5).transpose(0, 1), True),
    ],
)
def test_tensors_without_gaps_are_found(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense
