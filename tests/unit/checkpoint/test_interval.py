"""checkpoint/interval.py against values computed by hand, and against the simulation of benchmarks/goodput.py."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paceline.checkpoint.interval import Failures, auto_interval_s, best_interval_s, goodput


def test_a_cheap_save_gives_the_interval_of_young() -> None:
    assert best_interval_s(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-3)


def test_an_expensive_save_gives_the_higher_order_interval() -> None:
    # C = 200, M = 1000, C / 2M = 0.1: sqrt(400,000) * (1 + sqrt(0.1) / 3 + 0.1 / 9) - 200
    assert best_interval_s(200.0, 1000.0) == pytest.approx(632.4555 * (1 + 0.105409 + 0.011111) - 200, rel=1e-5)
    assert best_interval_s(5000.0, 1000.0) == 1000.0


@pytest.mark.parametrize("save_cost_s", [0.1, 10.0, 300.0, 1500.0])
def test_no_other_interval_has_a_better_goodput(save_cost_s: float) -> None:
    best = goodput(best_interval_s(save_cost_s, 1000.0), save_cost_s, 20.0, 1000.0)
    others = [goodput(10 ** (exponent / 50), save_cost_s, 20.0, 1000.0) for exponent in range(250)]
    assert best >= max(others) * 0.999


def test_goodput_is_the_share_of_steps_that_are_not_repeated() -> None:
    # Without failures only saves cost time.
    assert goodput(99.0, 1.0, 50.0, 1e12) == pytest.approx(0.99)
    # C = 0, R = 0, T = M: 1 / (e - 1); a restart of M costs a factor of e, and so does a publication of M.
    assert goodput(10.0, 0.0, 0.0, 10.0) == pytest.approx(1 / (math.e - 1))
    assert goodput(10.0, 0.0, 10.0, 10.0) == pytest.approx(1 / (math.e - 1) / math.e)
    assert goodput(10.0, 0.0, 0.0, 10.0, publish_s=10.0) == pytest.approx(1 / (math.e - 1) / math.e)


def test_auto_saves_every_ten_minutes_unless_saves_cost_much_or_ranks_fail_often() -> None:
    assert auto_interval_s(0.02, Failures(2).mtbf_s) == 600  # a small run
    assert auto_interval_s(0.4, Failures(4096).mtbf_s) == pytest.approx(187.6, abs=1)  # sqrt(2 * 0.4 * 43,945)
    assert auto_interval_s(0.0002, Failures(4096).mtbf_s) == 60
    assert auto_interval_s(30.0, Failures(8).mtbf_s) == 3000  # one percent
    assert auto_interval_s(30.0, 36_000.0) == pytest.approx(1449.8, abs=0.1)  # sqrt(2 * 30 * 36,000) * 1.0068 - 30


def test_failures_of_the_run_count_if_they_are_more_than_expected() -> None:
    assert Failures(16_384).mtbf_s / 3600 == pytest.approx(3.05, abs=0.01)
    assert Failures(8, count=3, observed_s=7200.0).mtbf_s == 2400
    assert Failures(50_000, count=1, observed_s=36_000.0).mtbf_s == 3600


@pytest.fixture
def simulation() -> ModuleType:
    """benchmarks/goodput.py"""
    path = Path(__file__).parents[3] / "benchmarks" / "goodput.py"
    spec = importlib.util.spec_from_file_location("goodput_simulation", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["goodput_simulation"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_goodput_and_the_best_interval_are_those_of_the_simulation(simulation: ModuleType) -> None:
    costs, mtbf_s = simulation.Costs(save_s=20.0, publish_s=60.0, restart_s=100.0), 2000.0

    def simulated(interval_s: float) -> float:
        random = np.random.default_rng(3)
        steps = simulation.StepTimes([0.9, 1.0, 1.1], ranks=4, random=random, count=2000)
        failures, every = simulation.exponential(mtbf_s, random), round(interval_s / steps.mean_s)
        return float(simulation.simulate(steps, costs, total=1_000_000, every=every, failures=failures).goodput)

    best_s = best_interval_s(costs.save_s, mtbf_s)
    found = {factor: simulated(best_s * factor) for factor in (0.4, 0.7, 1.0, 1.4, 2.5)}
    for factor, value in found.items():
        told = goodput(best_s * factor, costs.save_s, costs.restart_s, mtbf_s, costs.publish_s)
        assert value == pytest.approx(told, rel=0.02)
    assert found[1.0] >= max(found.values()) - 0.005
    assert found[0.4] < found[1.0] - 0.01
    assert found[2.5] < found[1.0] - 0.01


def test_the_simulation_loses_the_steps_since_the_last_published_checkpoint(simulation: ModuleType) -> None:
    steps = simulation.StepTimes([1.0], ranks=2, random=np.random.default_rng(0))
    costs = simulation.Costs(save_s=1.0, publish_s=5.0, restart_s=10.0)

    def outcome(*failures: float, in_restart: bool = False) -> tuple[float, int, int]:
        found = simulation.simulate(
            steps, costs, total=30, every=10, failures=iter([*failures, 1e9]), in_restart=in_restart
        )
        return found.wall_s, found.failures, found.repeated_steps

    assert outcome() == (32, 0, 0)
    assert outcome(14.5) == (14.5 + 10 + 32, 1, 13)  # step 10 was not yet published
    assert outcome(16.5) == (16.5 + 10 + 21, 1, 5)
    assert outcome(16.5, 4.0, in_restart=True) == (16.5 + 4 + 10 + 21, 2, 5)  # the restart fails, too
