"""Sums of gradients whose bits do not depend on the order of the summands: each lane is rounded to integers first.

Floating-point addition rounds, so its result depends on the order; integer addition does not round. The elements of
each gradient are divided into blocks, and the largest exponent in a block, over all lanes and ranks, fixes the grid to
which every lane rounds that block. The grid is so coarse that the sum of all lanes does not overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.flat import slots_in, starts_of

BLOCK = 256  # elements that share a grid; an exchange of one number for each of them costs 1/256 of the sum

Gradients = list[torch.Tensor]


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format, and the integers of the same size to which its numbers are rounded."""

    dtype: torch.dtype
    integer: torch.dtype
    mantissa_bits: int
    special: int  # the exponent field of Inf and NaN

    def power(self, field: torch.Tensor) -> torch.Tensor:
        """The powers of two with these exponent fields."""
        return (field << self.mantissa_bits).view(self.dtype)


FLOAT32 = FloatFormat(torch.float32, torch.int32, 23, 0xFF)
FLOAT64 = FloatFormat(torch.float64, torch.int64, 52, 0x7FF)


class IntegerSum:
    """The sum of some gradients over `lanes` lanes, rounded as described in this module.

    The three methods are called in their order. Between them, the caller combines what they return over the ranks.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], lanes: int, scratch: Scratch) -> None:
        """`gradients` have the shapes and strides of the sums; `scratch` is used until `write` returns."""
        self._format = FLOAT64 if gradients[0].dtype == torch.float64 else FLOAT32
        self._bits = 8 * gradients[0].new_empty(0, dtype=self._format.integer).element_size() - 1 - lanes.bit_length()
        # A block never spans two gradients, whose grouping depends on the number of ranks.
        self.starts = starts = starts_of(gradients, BLOCK)
        self._values, self._integers = (
            scratch.take(purpose, starts[-1], dtype, gradients[0].device)
            for purpose, dtype in (("values", self._format.dtype), ("integers", self._format.integer))
        )
        self._blocks = self._values.view(starts[-1] // BLOCK, BLOCK)
        self._slots = slots_in(self._values, gradients, starts)
        # What fills the last block of each gradient.
        ends = [start + gradient.numel() for start, gradient in zip(starts, gradients, strict=False)]
        gaps = [self._values[end:start] for end, start in zip(ends, starts[1:], strict=True) if end < start]
        if gaps:
            torch._foreach_zero_(gaps)

    def exponents(self, lanes: Sequence[Gradients]) -> torch.Tensor:
        """The largest exponent field of each block in these lanes of this rank; to be combined by their maximum."""
        largest = self._values.new_zeros(len(self._blocks))
        for lane in lanes:
            torch._foreach_copy_(self._slots, lane)
            # The maximum of absolute values; NaN if there is one.
            torch.maximum(largest, torch.maximum(self._blocks.amax(1), self._blocks.amin(1).neg_()), out=largest)
        fields = largest.view(self._format.integer) >> self._format.mantissa_bits
        return fields.bitwise_and_(self._format.special)

    def integers(self, lanes: Sequence[Gradients], exponents: torch.Tensor) -> torch.Tensor:
        """The sum of these lanes of this rank as integers, by the exponents of all ranks; to be combined by their sum.

        The last of `lanes` is the last that `exponents` was called with.
        """
        kind = self._format
        # At least `bits`: the powers below must be normal numbers. Smaller values are rounded to multiples of 2^-126.
        fields = exponents.clamp(min=self._bits)
        scale = kind.power(kind.special - 2 + self._bits - fields)[:, None]
        # Where a block has Inf or NaN, its integers have no meaning.
        self._unit = kind.power(fields - self._bits + 1).masked_fill_(exponents == kind.special, torch.nan)
        if not lanes:
            self._integers.zero_()
        for index, lane in enumerate(reversed(lanes)):
            if index:
                torch._foreach_copy_(self._slots, lane)
            self._blocks.mul_(scale)
            self._values.round_()
            if index:
                self._integers.add_(self._values.to(kind.integer))
            else:
                self._integers.copy_(self._values)
        return self._integers

    def write(self, gradients: Gradients, first: int = 0) -> None:
        """Write the sum over all ranks, as the integers have it by now, to gradients, from the one at `first`."""
        start, end = self.starts[first], self.starts[first + len(gradients)]
        blocks = slice(start // BLOCK, end // BLOCK)
        self._values[start:end].copy_(self._integers[start:end])
        self._blocks[blocks].mul_(self._unit[blocks, None])
        torch._foreach_copy_(gradients, self._slots[first : first + len(gradients)])


class Scratch:
    """Memory for one sum at a time: for each purpose and format, as much as was needed at most so far."""

    def __init__(self) -> None:
        # Recorded CUDA graphs write to memory that they were recorded with, so none of a GPU is ever released.
        self._taken: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def take(self, purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of this size, with any contents; the same memory for the same purpose and format."""
        taken = self._taken.setdefault((purpose, dtype), [])
        if not taken or len(taken[-1]) < size:
            if device.type == "cpu":
                taken.clear()
            taken.append(torch.empty(size, dtype=dtype, device=device))
        return taken[-1][:size]
