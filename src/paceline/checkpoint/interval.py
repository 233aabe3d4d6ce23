"""How often to save: the interval that loses the least time to saves and failures. Pure functions.

The model is Daly's (2006): failures are independent, with an exponential distribution of the time between them, and a
save blocks training for `save_cost_s`. It is extended by `publish_s`, because a save that is written in the background
can be used only when it has been published. `benchmarks/goodput.py` compares this with simulated and real runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.formatting import ranks_text

RANK_MTBF_H = 50_000  # hours of one rank per failure: 16,384 GPUs failed 419 times in 54 days (Llama 3, 2024)
FIRST_S = 60.0  # the first save, whose cost decides about the next ones
SHORTEST_S, LONGEST_S = 60.0, 600.0  # the bounds of `auto`
MOST_COST = 0.01  # of the time, for saves; if they would cost more at LONGEST_S, they are less frequent


@dataclass(frozen=True)
class Failures:
    """The number of ranks, any of which ends an attempt when it fails, and the failures of this run so far."""

    ranks: int
    count: int = 0
    observed_s: float = 0.0  # the time in which they were counted

    @property
    def mtbf_s(self) -> float:
        """Seconds between two failures of the run: expected for this number of ranks, or observed if that is worse."""
        expected_s = 3600 * RANK_MTBF_H / self.ranks
        return min(expected_s, max(self.observed_s, 1.0) / self.count) if self.count else expected_s


def best_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves for the best goodput, in Daly's higher-order form.

    The time of a restart, and until a save is published, costs the same for any interval, so it is not needed.
    """
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2 * mtbf_s)
    return math.sqrt(2 * save_cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def goodput(
    interval_s: float, save_cost_s: float, restart_s: float, mtbf_s: float, publish_s: float | None = None
) -> float:
    """The expected share of the time that trains steps which are never repeated.

    `restart_s`: from a failure to the first step after it. `publish_s`: from the start of a save until it can be used;
    without it, a save can be used as soon as it no longer blocks.
    """
    delay_s = restart_s + max((publish_s or 0.0) - save_cost_s, 0.0)
    cycle = (interval_s + save_cost_s) / mtbf_s
    return interval_s / mtbf_s * math.exp(-delay_s / mtbf_s - cycle) / -math.expm1(-cycle)


def auto_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """The interval of `every_minutes: auto`: the best one within bounds.

    From one to ten minutes; longer where saves would cost more than one percent of the time at ten minutes.
    """
    longest_s = max(LONGEST_S, save_cost_s / MOST_COST)
    return min(max(best_interval_s(save_cost_s, mtbf_s), SHORTEST_S), longest_s)


def describe_interval(interval_s: float, save_cost_s: float, failures: Failures) -> str:
    """The interval and its reason, for the report of a run."""
    if failures.mtbf_s < Failures(failures.ranks).mtbf_s:
        times = "once" if failures.count == 1 else f"{failures.count} times"
        rate = f"this run has failed {times} in {failures.observed_s / 3600:.2g} h"
    else:
        verb = "is" if failures.ranks == 1 else "are"
        rate = f"{ranks_text(failures.ranks)} {verb} expected to fail once in {failures.mtbf_s / 3600:,.0f} h"
    return f"a checkpoint is saved every {interval_s / 60:.3g} min: a save costs {save_cost_s:.2g} s, and {rate}"
