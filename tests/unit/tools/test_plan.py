"""The model of a step on many ranks: values that were computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.tools.plan.advice import advice_on
from paceline.tools.plan.collectives import Network, all_reduce, broadcast, exchange_s
from paceline.tools.plan.facts import Gradient, Measured, RunKeys
from paceline.tools.plan.fit import largest_batch
from paceline.tools.plan.forecast import Terms, forecast, possible_ranks
from paceline.tools.plan.links import Link, parse_duration, parse_link
from paceline.tools.plan.measure import loopback_of
from paceline.tools.plan.model import buckets_of, step_time
from paceline.tools.report.planned import PLAN, planned_of

FREE = Link(math.inf, 0.0)
MEASURED = Measured(
    device="cpu", backend="gloo", cores=8, threads=1, concurrent=1, forward_ms=10.0, backward_ms=20.0, update_ms=4.0,
    other_ms=1.0, loader_ms=0.0, is_loader_ahead=True, round_ms=0.0, round_lane_ms=0.0,
    gradients=(Gradient(600_000, 4, 5.0), Gradient(400_000, 4, 20.0)), has_overlap=True, buffer_bytes=0,
    optimizer_bytes=8_000_000, memory_bytes=100_000_000, capacity_bytes=1_000_000_000, loopback_bytes_per_s=math.inf,
    loopback_latency_s=0.0,
)  # fmt: skip
KEYS = RunKeys(
    batch_size=10, lanes=None, samples=1_000, val_samples=0, num_epochs=2, max_steps=None, evaluate_every_steps=None,
    evaluate_every_epochs=1, is_exact=False, compression="none", bucket_mb=25, shards_optimizer=False,
)  # fmt: skip


def network(
    ranks: int, bytes_per_s: float, latency_s: float = 0.0, per_host: int = 1, backend: str = "gloo"
) -> Network:
    return Network(ranks, per_host, Link(bytes_per_s, latency_s), FREE, backend)


def test_a_ring_of_gloo_sends_each_chunk_twice_and_waits_for_the_notice_of_each_half() -> None:
    cost = all_reduce(1_000_000, network(2, 1e6, 0.01))
    assert cost.link_s == pytest.approx(1.0)  # half a megabyte, twice
    assert cost.seconds == pytest.approx(1.04)  # in each half the notice, and the first bytes on their way


def test_a_short_message_takes_four_latencies_for_each_further_rank() -> None:
    assert all_reduce(64, network(2, 1e12, 0.02)).seconds == pytest.approx(0.08)
    assert all_reduce(64, network(4, 1e12, 0.01)).seconds == pytest.approx(0.12)
    assert all_reduce(64, network(4, 1e12, 0.01, per_host=2)).seconds == pytest.approx(0.12)  # the longest hop counts


def test_a_sum_costs_nothing_on_one_rank_and_no_latency_of_the_link_on_one_host() -> None:
    assert all_reduce(1e9, network(1, 1e6, 1.0)).seconds == 0
    assert all_reduce(1e6, network(4, 1e6, 1.0, per_host=4)).seconds == 0
    assert exchange_s(network(4, 1e6, 1.0, per_host=4)) == 0
    assert exchange_s(network(4, 1e12, 0.01)) == pytest.approx(0.12)


def test_nccl_uses_a_tree_where_latency_counts_and_a_ring_where_bytes_count() -> None:
    many = network(1024, 1e9, 1e-4, backend="nccl")
    assert all_reduce(1_000, many).seconds == pytest.approx(2e-6 + 2 * 10 * 1e-4)
    assert all_reduce(1e9, network(4, 1e9, 0.0, backend="nccl")).seconds == pytest.approx(1.5)


def test_a_broadcast_doubles_the_ranks_that_have_it() -> None:
    assert broadcast(1_000_000, network(8, 1e6, 0.0)).seconds == pytest.approx(3.0)


def test_buckets_close_with_the_gradient_that_fills_them() -> None:
    gradients = [Gradient(size, 4, ready) for size, ready in ((3, 1.0), (4, 2.0), (2, 3.0), (9, 4.0))]
    assert [(bucket.size, bucket.ready_s) for bucket in buckets_of(gradients, 6)] == [(7, 0.002), (11, 0.004)]


def test_a_single_rank_computes_its_lanes_and_updates_once() -> None:
    time = step_time(MEASURED, KEYS.with_(lanes=3), network(1, 1e6))
    assert time.seconds == pytest.approx(3 * 0.030 + 0.005)
    assert time.limit == "compute"


def test_a_sum_that_is_done_before_backward_ends_costs_nothing() -> None:
    keys = KEYS.with_(bucket_mb=0.5)  # the first bucket, of 0.6 MB, is ready 15 ms before backward ends
    fast = step_time(MEASURED, keys, network(2, 40e6))  # 15 ms for the first, 10 ms for the second
    assert fast.seconds == pytest.approx(0.035 + 0.010)
    slow = step_time(MEASURED, keys, network(2, 4e6))  # 150 and 100 ms, one after the other
    assert slow.seconds == pytest.approx(0.010 + 0.005 + 0.250 + 0.005)
    assert slow.limit == "network"


def test_integers_need_the_exponents_first() -> None:
    keys = KEYS.with_(is_exact=True, lanes=4)
    plain = step_time(MEASURED, KEYS.with_(lanes=4), network(2, 1e6, 0.01)).seconds
    exact = step_time(MEASURED, keys, network(2, 1e6, 0.01)).seconds
    assert exact - plain == pytest.approx(1 / 256 + 0.04)
    rounded = replace(MEASURED, round_ms=3.0, round_lane_ms=1.0, cores=1)  # backward waits for the same core
    assert step_time(rounded, keys, network(2, 1e6, 0.01)).seconds - exact == pytest.approx(0.004)


def test_halves_send_half_of_the_bytes() -> None:
    time = step_time(MEASURED, KEYS.with_(compression="bf16"), network(2, 1e6))
    assert time.seconds == pytest.approx(0.035 + 0.5)


def test_the_limit_is_what_takes_most_of_a_step() -> None:
    assert step_time(MEASURED, KEYS, network(2, 1e12, 0.1)).limit == "latency"
    waiting = step_time(replace(MEASURED, loader_ms=100.0), KEYS, network(1, 1e12))
    assert (waiting.limit, waiting.seconds) == ("loader", pytest.approx(0.1))  # fetched while the step runs
    serial = replace(MEASURED, loader_ms=100.0, is_loader_ahead=False)
    assert step_time(serial, KEYS, network(1, 1e12)).seconds == pytest.approx(0.135)


def test_a_forecast_counts_steps_time_price_and_efficiency() -> None:
    terms = Terms(Link(1e6, 0.0), per_host=1, price=3.6, deadline_s=60)
    alone, two = (forecast(MEASURED, KEYS, terms, ranks) for ranks in (1, 2))
    assert (alone.steps, two.steps) == (200, 100)
    assert alone.seconds == pytest.approx(200 * 0.035)
    assert two.seconds == pytest.approx(100 * 1.035)
    assert two.price == pytest.approx(2 * 0.1035)
    assert two.efficiency == pytest.approx(0.035 / 1.035)
    assert (alone.is_in_time, two.is_in_time) == (True, False)
    assert possible_ranks([1, 2, 4, 8], KEYS.with_(lanes=4)) == [1, 2, 4]


def test_memory_has_a_copy_of_the_gradients_for_each_lane_and_a_share_of_the_optimizer() -> None:
    terms = Terms(FREE, per_host=4)
    lanes = KEYS.with_(is_exact=True, lanes=16, bucket_mb=0.25)
    assert forecast(MEASURED, lanes, terms, 4).memory_bytes == 100_000_000 + 2 * 1_000_000 + 4 * 2**18
    sharded = forecast(MEASURED, KEYS.with_(shards_optimizer=True), terms, 4)
    assert sharded.memory_bytes == 100_000_000 - 1_000_000 - 6_000_000
    assert sharded.fits
    assert not forecast(replace(MEASURED, capacity_bytes=300_000_000), KEYS, terms, 4).fits


def test_the_advice_is_computed_by_the_model() -> None:
    terms = Terms(Link(1e6, 0.0), per_host=1, price=1.0, deadline_s=60)
    keys = KEYS.with_(is_exact=True)
    text = "\n".join(advice_on(MEASURED, keys, terms, [forecast(MEASURED, keys, terms, each) for each in (1, 4)]))
    assert "the deadline is met with 1 rank" in text
    assert "waiting for bytes on the network is the limit at 4 ranks" in text
    assert "runs on more than 1 rank are slower" in text
    assert "lanes=32 gives 7.04 times" in text  # 1.541 s for 4 lanes, 1.751 s for 32
    assert "compression=bf16 with exact=false gives 1.9" in text
    assert "shard_optimizer" not in text  # 6 of 100 MB


def test_links_have_names_or_numbers() -> None:
    assert parse_link("100mbit,5ms") == Link(12.5e6, 0.005)
    assert parse_link("3GB/s, 2us") == Link(3e9, pytest.approx(2e-6))
    assert parse_link("IB400").bytes_per_s == 48e9
    assert parse_duration("90m") == 5400
    for text in ("fast", "10gbit", "1..2gbit,1ms", "0gbit,1ms"):
        with pytest.raises(ConfigError, match="is not a link"):
            parse_link(text)
    with pytest.raises(ConfigError, match="--deadline 12 is not a time"):
        parse_duration("12")


def test_the_speed_of_this_host_is_that_for_which_the_model_takes_the_measured_time() -> None:
    link = loopback_of(0.012, 4.012, ranks=4)
    assert link.latency_s == pytest.approx(0.001)
    assert link.bytes_per_s == pytest.approx(1.5e6)  # 6 of 4 MB pass each link


def test_the_largest_batch_is_found_with_few_trials() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 100

    assert largest_batch(fits, 16, 10_000) == 96
    assert tried == [32, 64, 128, 96, 112, 104]
    assert largest_batch(lambda size: True, 16, 50) == 48


def test_a_report_compares_a_run_with_the_plan_beside_it(tmp_path: Path) -> None:
    row = asdict(forecast(MEASURED, KEYS, Terms(FREE, 1), 2))
    alone = asdict(forecast(MEASURED, KEYS, Terms(FREE, 1), 1))
    plan = {"name": "lab", "rows": [alone, row], "keys": asdict(KEYS), "settings": {"name": "lab", "batch_size": 10}}
    (tmp_path / PLAN).write_text(json.dumps(plan))
    settings = {"name": "lab", "batch_size": 10, "seed": 3}
    found = planned_of(tmp_path / "run", settings, ranks=2, lanes=2, samples_per_s=400.0, seconds=6.0)
    assert found is not None
    assert found.rows == [
        ("step", "35 ms", "50 ms"), ("samples per second", "571", "400"), ("efficiency", "100%", "70%"),
        ("time to the end", "3.5 s", "6 s"),
    ]  # fmt: skip
    assert found.remark == ""
    other = planned_of(tmp_path / "run", {**settings, "batch_size": 20}, 2, 2, 400.0, None)
    assert other is not None
    assert other.remark == "the plan was made with other values of batch_size"
    unknown = planned_of(tmp_path / "run", settings, 3, 3, 400.0, None)
    assert unknown is not None
    assert "paceline plan --ranks 3" in unknown.remark
    assert planned_of(tmp_path / "run", {"name": "another"}, 2, 2, 400.0, None) is None
    (tmp_path / PLAN).write_text("no JSON")
    assert planned_of(tmp_path / "run", settings, 2, 2, 400.0, None) is None
