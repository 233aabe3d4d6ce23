"""Goodput: the share of the time that trains steps which are never repeated, simulated for 8 to 4,096 ranks.

    python benchmarks/goodput.py                       tables: the interval of checkpoints, elastic runs, stragglers
    python benchmarks/goodput.py --real [--runs 2]     real runs whose ranks are killed, against their simulation;
                                                       with --computes, their steps compute instead of waiting

The simulation is driven by measured numbers: the times of single steps of a rank (`--pace`, the events of a run with
log.every_steps=1; else those of QUANTILES), the cost of saves, the time of a restart, and a rate of failures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.checkpoint.interval import RANK_MTBF_H, best_interval_s, goodput

Times = Sequence[float] | np.ndarray

RANKS = (8, 64, 512, 4096)
RANKS_OF_HOST = 8
# Of the times of a rank's own work in a step; `--pace` prints them for another run.
LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 1.0)
QUANTILES: tuple[float, ...] = (1.0,) * len(LEVELS)  # relative to the median


@dataclass(frozen=True)
class Costs:
    """Seconds that saves and restarts take."""

    save_s: float  # of training, for one save
    publish_s: float  # from the start of a save until it can be used
    restart_s: float  # from a failure to the first step after it: detection, start of the ranks, restoring


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run."""

    wall_s: float
    useful_s: float  # the time of all steps, each counted once
    failures: int
    repeated_steps: int

    @property
    def goodput(self) -> float:
        return self.useful_s / self.wall_s


class StepTimes:
    """Seconds of the steps of a run: each is the maximum over ranks, whose times are independent."""

    def __init__(self, own_s: Times, ranks: int, random: np.random.Generator, count: int = 20_000) -> None:
        """`own_s`: measured times of a rank's own work. The maximum of n draws is the quantile of u^(1/n)."""
        draws = np.quantile(own_s, random.random(count) ** (1 / ranks))
        self._count, self._ends = count, np.concatenate([[0.0], np.cumsum(draws)])
        self.mean_s = float(self._ends[-1]) / count

    def _end_of(self, step: int) -> float:
        return float(step // self._count * self._ends[-1] + self._ends[step % self._count])

    def between(self, first: int, last: int) -> float:
        """Seconds from the end of step `first` to the end of step `last`."""
        return self._end_of(last) - self._end_of(first)

    def done_in(self, first: int, seconds: float) -> int:
        """The number of steps that end within some seconds after step `first`."""
        whole, rest = divmod(self._end_of(first) + seconds, float(self._ends[-1]))
        done = int(whole) * self._count + int(np.searchsorted(self._ends, rest, side="right")) - 1
        return max(done - first, 0)


def exponential(mean_s: float, random: np.random.Generator) -> Iterator[float]:
    """The seconds between failures."""
    while True:
        yield float(random.exponential(mean_s))


def simulate(
    steps: StepTimes, costs: Costs, *, total: int, every: int, failures: Iterator[float], in_restart: bool = True
) -> Outcome:
    """Train `total` steps with a save every `every` steps, as Paceline saves and restarts.

    `failures` has the seconds from one failure to the next; without `in_restart`, from the first step after a restart.
    """
    wall_s, failed, repeated, published = 0.0, 0, 0, 0
    while True:
        until = next(failures)
        restart_s = costs.restart_s if failed else 0.0
        if in_restart and failed:
            if until <= restart_s:
                wall_s, failed = wall_s + until, failed + 1
                continue
            until -= restart_s
        end_s, step, published = _attempt(steps, costs, published, total, every, until)
        wall_s += restart_s + end_s
        if step == total:
            return Outcome(wall_s, steps.between(0, total), failed, repeated)
        failed, repeated = failed + 1, repeated + step - published


def _attempt(
    steps: StepTimes, costs: Costs, first: int, total: int, every: int, until: float
) -> tuple[float, int, int]:
    """Train from step `first` until a failure; the seconds, the last step, and the step that was saved last."""
    now, step, published = 0.0, first, first
    saving, published_at = first, math.inf
    while True:
        due = min((step // every + 1) * every, total)
        if saving > published:  # one save at a time: the next one follows it
            due = max(due, min(step + steps.done_in(step, published_at - now) + 1, total))
        reached = now + steps.between(step, due)
        if published_at <= min(reached, until):
            published, published_at = saving, math.inf
        if reached > until:
            return until, step + steps.done_in(step, until - now), published
        now, step = reached, due
        if step == total:
            return now, step, published
        saving, published_at = step, now + costs.publish_s
        if now + costs.save_s > until:
            return until, step, published
        now += costs.save_s


def speed(up: int, hosts: int, lanes_per_rank: int) -> float:
    """The speed of `up` of `hosts` hosts: each rank computes whole lanes, and the ranks with most of them decide."""
    lanes = hosts * RANKS_OF_HOST * lanes_per_rank
    return lanes_per_rank / math.ceil(lanes / (up * RANKS_OF_HOST))


def simulate_elastic(
    hosts: int, lanes_per_rank: int, replace_s: float, *, waits: bool, costs: Costs, host_mtbf_s: float,
    interval_s: float, days: float, random: np.random.Generator,
) -> float:  # fmt: skip
    """The goodput of a run that loses hosts and gets a replacement for each after `replace_s`.

    It waits for it, or continues with fewer hosts until then. Both restart once the host is there.
    """
    now, work, back = 0.0, 0.0, list[float]()
    while now < days * 86_400:
        up = hosts - len(back)
        if up == 0 or (waits and back):
            now, back = max(now, back[0]) + costs.restart_s, back[1:]
            continue
        failure_at = now + random.exponential(host_mtbf_s / up)
        rate = speed(up, hosts, lanes_per_rank) * interval_s / (interval_s + costs.save_s)
        if back and back[0] <= failure_at:  # a stop on request, which loses no step
            work += rate * max(back[0] - now, 0.0)
            now, back = max(now, back[0]) + costs.restart_s, back[1:]
            continue
        lost_s = min(random.uniform(0, interval_s) + costs.publish_s, failure_at - now)
        work += rate * (failure_at - now - lost_s)
        back = sorted([*back, failure_at + replace_s])
        now = failure_at + (0.0 if waits else costs.restart_s)
    return work / now


# --- tables ----------------------------------------------------------------------------------------------------------


def interval_table(own_s: Times, costs: Costs, mtbf_h: float, days: float, seed: int) -> None:
    """Goodput for several intervals, simulated and, in brackets, as the formula gives it."""
    minutes = (1, 5, 10, 30, 60)
    print(f"one failure in {mtbf_h:,.0f} h of a rank; goodput in percent, simulated (formula)\n")
    print(
        f"| ranks | a failure every | {' | '.join(f'{each} min' for each in minutes)} | best interval | its goodput |"
    )
    print("|---" * (len(minutes) + 4) + "|")
    for ranks in RANKS:
        mtbf_s = 3600 * mtbf_h / ranks
        best_s = best_interval_s(costs.save_s, mtbf_s)
        cells = [
            f"{simulated_goodput(own_s, ranks, costs, s, mtbf_s, days, seed):.2%} "
            f"({goodput(s, costs.save_s, costs.restart_s, mtbf_s, costs.publish_s):.2%})"
            for s in (*(60.0 * each for each in minutes), best_s)
        ]
        *others, last = [cell.replace("%", "") for cell in cells]
        every = f"{mtbf_s / 3600:,.0f} h" if mtbf_s >= 36_000 else f"{mtbf_s / 3600:.1f} h"
        print(f"| {ranks:,} | {every} | {' | '.join(others)} | {best_s / 60:.1f} min | {last} |")
    print()


def simulated_goodput(
    own_s: Times, ranks: int, costs: Costs, interval_s: float, mtbf_s: float, days: float, seed: int
) -> float:
    """The goodput of one long simulated run."""
    random = np.random.default_rng(seed)
    steps = StepTimes(own_s, ranks, random)
    total, every = round(days * 86_400 / steps.mean_s), max(round(interval_s / steps.mean_s), 1)
    return simulate(steps, costs, total=total, every=every, failures=exponential(mtbf_s, random)).goodput


def elastic_table(costs: Costs, mtbf_h: float, days: float, seed: int) -> None:
    """Runs that wait for a replacement, and runs that continue with fewer hosts."""
    waits_s = {"10 min": 600.0, "1 h": 3600.0, "1 day": 86_400.0}
    print(f"one failure in {mtbf_h:,.0f} h of a rank, {RANKS_OF_HOST} ranks per host; goodput in percent\n")
    print("| ranks | a replacement takes | waits for it | continues, 1 lane per rank | 4 lanes | 16 lanes |")
    print("|---" * 6 + "|")
    for ranks in RANKS[1:]:
        for name, replace_s in waits_s.items():
            host_mtbf_s = 3600 * mtbf_h / RANKS_OF_HOST
            interval_s = best_interval_s(costs.save_s, 3600 * mtbf_h / ranks)
            cells = []
            for lanes, waits in ((1, True), (1, False), (4, False), (16, False)):
                random = np.random.default_rng(seed)
                value = simulate_elastic(
                    ranks // RANKS_OF_HOST, lanes, replace_s, waits=waits, costs=costs, host_mtbf_s=host_mtbf_s,
                    interval_s=interval_s, days=days, random=random,
                )  # fmt: skip
                cells.append(f"{100 * value:.1f}")
            print(f"| {ranks:,} | {name} | {' | '.join(cells)} |")
    print()


def straggler_table(own_s: Times, seed: int) -> None:
    """How much longer steps are when ranks are slow at times, or always."""
    print("step time, relative to that of one rank without stragglers\n")
    print("| ranks | as measured | + 1 of 10,000 steps of a rank takes twice as long | + 1 of 1,000 | "
          "+ 1 of 1,000 ranks is 20 % slower, always |")  # fmt: skip
    print("|---" * 5 + "|")
    for ranks in RANKS:
        cells = []
        for share in (0.0, 1e-4, 1e-3):
            random = np.random.default_rng(seed)
            times = StepTimes(own_s, ranks, random)
            steps_s = np.diff(times._ends)
            median = float(np.median(own_s))
            is_slow = random.random(len(steps_s)) < -math.expm1(ranks * math.log1p(-share))
            cells.append(float(np.where(is_slow, np.maximum(steps_s, 2 * median), steps_s).mean()) / np.mean(own_s))
        any_slow = -math.expm1(ranks * math.log1p(-1e-3))
        cells.append(cells[0] * (1 + 0.2 * any_slow))
        print(f"| {ranks:,} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    print()


# --- measured numbers ------------------------------------------------------------------------------------------------


def own_times(events: Path) -> list[float]:
    """Seconds of each rank's own work in each step: without the time in which it waits for others."""
    found = []
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "pace" and "reduction" in event["phase_ms"]:
            waited = event["phase_ms"]["reduction"]
            found += [1e-3 * (step - wait) for step, wait in zip(event["step_ms"], waited, strict=True)]
    return found[len(found) // 10 :]  # the first steps warm up


def quantiles_of(own_s: Sequence[float]) -> tuple[float, ...]:
    """The quantiles at LEVELS, relative to the median."""
    median = statistics.median(own_s)
    return tuple(round(float(each) / median, 3) for each in np.quantile(own_s, LEVELS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", type=Path, help="events.jsonl of a run with log.every_steps=1")
    parser.add_argument("--step-s", type=float, default=1.0, help="median seconds of a step in the tables")
    parser.add_argument("--save-s", type=float, default=0.39, help="seconds of training that a save costs")
    parser.add_argument("--publish-s", type=float, default=8.4, help="seconds until a save can be used")
    parser.add_argument("--restart-s", type=float, default=120.0, help="seconds from a failure to the next step")
    parser.add_argument(
        "--mtbf-hours", type=float, nargs="+", default=[RANK_MTBF_H, RANK_MTBF_H / 10], help="of a rank"
    )
    parser.add_argument("--days", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="run and kill real ranks, and compare")
    parser.add_argument("--computes", action="store_true", help="steps of --real compute instead of waiting")
    parser.add_argument("--runs", type=int, default=2, help="disturbed runs of --real")
    parser.add_argument("--out", type=Path, help="a file to which --real adds its results, whose table it prints")
    options = parser.parse_args()
    if options.real:
        import goodput_real  # the file next to this one

        goodput_real.main(options.runs, options.seed, options.out, computes=options.computes)
        return
    quantiles = quantiles_of(own_times(options.pace)) if options.pace else QUANTILES
    print("quantiles of the time of a rank's own work:", dict(zip(LEVELS, quantiles, strict=True)), "\n")
    own_s = options.step_s * np.interp(np.linspace(0, 1, 5001), LEVELS, quantiles)
    costs = Costs(options.save_s, options.publish_s, options.restart_s)
    print(f"{costs}, steps of {options.step_s} s (median of one rank), {options.days:g} days\n")
    for mtbf_h in options.mtbf_hours:
        interval_table(own_s, costs, mtbf_h, options.days, options.seed)
    for mtbf_h in options.mtbf_hours:
        elastic_table(costs, mtbf_h, options.days, options.seed)
    straggler_table(own_s, options.seed)


if __name__ == "__main__":
    main()
