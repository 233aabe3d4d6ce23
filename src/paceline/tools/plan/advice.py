"""What to change so that a run on many ranks is faster or fits: each sentence is computed by the model (pure).

A check is a generator of sentences, and `CHECKS` has their order. Advice on failures, such as the interval of
checkpoints for a mean time between failures, belongs there as one more check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paceline.formatting import ranks_text, size_text
from paceline.tools.plan.facts import Measured, RunKeys
from paceline.tools.plan.forecast import Forecast, Terms, forecast

BUCKETS_MB = (1, 5, 10, 25, 50, 100)
GAIN = 1.05  # smaller gains of speed are not worth a sentence
SAVED = 0.1  # of a rank's memory; smaller shares are not worth one either
EFFICIENT = 0.9


class Case(NamedTuple):
    """What advice is given on: the measurements, the terms, and the forecast for the most ranks."""

    measured: Measured
    keys: RunKeys
    terms: Terms
    row: Forecast

    def gain(self, keys: RunKeys) -> float:
        """The samples per second with other keys, relative to those of the forecast."""
        return self.of(keys).samples_per_s / self.row.samples_per_s

    def of(self, keys: RunKeys) -> Forecast:
        """The forecast for the same ranks with other keys."""
        return forecast(self.measured, keys, self.terms, self.row.ranks)


def advice_on(measured: Measured, keys: RunKeys, terms: Terms, rows: Sequence[Forecast]) -> list[str]:
    """Sentences, the most important first."""
    case = Case(measured, keys, terms, rows[-1])
    return [*_deadline(rows), *_fastest(rows), *(sentence for check in CHECKS for sentence in check(case))]


def _deadline(rows: Sequence[Forecast]) -> Iterator[str]:
    known = [row for row in rows if row.is_in_time is not None]
    in_time = [row for row in known if row.is_in_time and row.fits]
    if in_time:
        best = min(in_time, key=lambda row: (row.price if row.price is not None else 0.0, row.ranks))
        price = f", for {best.price:,.2f}" if best.price is not None else ""
        yield f"the deadline is met with {ranks_text(best.ranks)}{price}"
    elif known:
        yield "no number of ranks in the table meets the deadline"


def _fastest(rows: Sequence[Forecast]) -> Iterator[str]:
    """The number of ranks beyond which a run takes longer."""
    best = max(rows, key=lambda row: row.samples_per_s)
    if best is not rows[-1]:
        yield f"runs on more than {ranks_text(best.ranks)} are slower: their sums take longer than they save"


def _limit(case: Case) -> Iterator[str]:
    row = case.row
    share = f"{row.shares[row.limit]:.0%} of a step"
    if row.limit == "compute":
        yield f"compute is the limit at {ranks_text(row.ranks)}: {share}, efficiency {row.efficiency:.0%}"
        return
    words = {
        "loader": "waiting for samples is", "network": "waiting for bytes on the network is",
        "latency": "waiting for messages on their way is",
    }  # fmt: skip
    yield f"{words[row.limit]} the limit at {ranks_text(row.ranks)}: {share}, efficiency {row.efficiency:.0%}"
    if row.limit == "loader":
        yield "raise workers, or provide the samples as tensors (paceline profile shows what they wait for)"


def _lanes(case: Case) -> Iterator[str]:
    """More lanes for each rank: fewer sums for the same number of samples."""
    row, keys = case.row, case.keys
    if row.ranks == 1 or row.efficiency > EFFICIENT:
        return
    found = [(times, case.of(keys.with_(lanes=times * row.lanes))) for times in (2, 4, 8)]
    times, best = next((each for each in found if each[1].efficiency > EFFICIENT), found[-1])
    if best.samples_per_s > GAIN * row.samples_per_s:
        yield (
            f"lanes={best.lanes} gives {best.samples_per_s / row.samples_per_s:.2f} times the samples per second, with "
            f"efficiency {best.efficiency:.0%}; a step has {times} times the samples, so adapt the learning rate"
        )


def _buckets(case: Case) -> Iterator[str]:
    best = max(BUCKETS_MB, key=lambda size: case.gain(case.keys.with_(bucket_mb=size)))
    if (gain := case.gain(case.keys.with_(bucket_mb=best))) > GAIN:
        yield f"bucket_mb={best} gives {gain:.2f} times the samples per second"


def _compression(case: Case) -> Iterator[str]:
    keys = case.keys
    if keys.compression != "none":
        return
    if (gain := case.gain(keys.with_(compression="bf16", is_exact=False))) > GAIN:
        exact = " with exact=false" if keys.is_exact else ""
        yield f"compression=bf16{exact} gives {gain:.2f} times the samples per second, and rounds gradients to 16 bits"


def _memory(case: Case) -> Iterator[str]:
    row = case.row
    sharded = case.of(case.keys.with_(shards_optimizer=True))
    saved = row.memory_bytes - sharded.memory_bytes
    if saved > SAVED * row.memory_bytes or (saved > 0 and not row.fits):
        yield f"shard_optimizer=true saves {size_text(saved)} of a rank's {size_text(row.memory_bytes)}"
    if not row.fits:
        yield f"{size_text(row.memory_bytes)} per rank do not fit; use a smaller batch_size with more lanes"


CHECKS: tuple[Callable[[Case], Iterator[str]], ...] = (_limit, _lanes, _buckets, _compression, _memory)
