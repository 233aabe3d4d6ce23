"""Ranks that die: all start again from the last checkpoint, as often as it makes sense."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from exactness_cases import layer_net
from faults import Disturbed, events, outcome, saved_steps, send_self, start

from paceline.errors import RankFailed

KILL = send_self(signal.SIGKILL)
SAVED_AT_ONCE = {"every_steps": 2, "async": False}  # there is a checkpoint when the third epoch begins


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(start(run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run")))


def fail() -> None:
    raise OSError("the file server is away")


def lives() -> int:
    return len(events("run_started"))


def test_a_killed_rank_costs_nothing_but_time(undisturbed: dict) -> None:
    log = Path("fetched").resolve()
    result = start(dataset_fn=lambda: Disturbed(log, [3], KILL), procs=2, checkpoint=SAVED_AT_ONCE)
    assert outcome(result) == undisturbed
    [restarted] = events("restarted")
    assert "SIGKILL; restarting from step" in restarted["text"]
    assert "(restart 1 of 3)" in restarted["text"]


def test_a_rank_that_is_always_killed_is_given_up_after_max_restarts() -> None:
    log = Path("fetched").resolve()
    with pytest.raises(RankFailed, match="SIGKILL"):
        start(
            dataset_fn=lambda: Disturbed(log, range(1, 99), KILL), procs=2, max_restarts=2, val_dataset_fn=None,
            val_fraction=0, model_fn=layer_net,
        )  # fmt: skip
    assert lives() == 3


def die_with_a_new_checkpoint() -> None:
    """Kill this rank as soon as a later step than at the last time has been published."""
    last = Path("last")
    known = int(last.read_text()) if last.exists() else 0
    while max(saved_steps(), default=0) <= known:
        time.sleep(0.02)
    last.write_text(str(max(saved_steps())))
    KILL()


def test_restarts_are_counted_from_zero_when_the_run_has_progressed(undisturbed: dict) -> None:
    log = Path("fetched").resolve()
    result = start(
        dataset_fn=lambda: Disturbed(log, [2, 4], die_with_a_new_checkpoint),
        checkpoint={"every_steps": 1}, max_restarts=1, procs=1,
    )  # fmt: skip
    assert outcome(result) == undisturbed
    assert lives() == 3


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time() -> None:
    log = Path("fetched").resolve()
    with pytest.raises(RankFailed, match="the file server is away"):
        start(dataset_fn=lambda: Disturbed(log, range(2, 99), fail), checkpoint={"every_steps": 1}, procs=2)
    assert lives() == 2


def test_an_error_that_passes_is_survived(undisturbed: dict) -> None:
    log = Path("fetched").resolve()
    result = start(dataset_fn=lambda: Disturbed(log, [2], fail), checkpoint={"every_steps": 2}, procs=2)
    assert outcome(result) == undisturbed
    assert lives() == 2


def test_an_error_before_the_first_checkpoint_is_shown_at_once() -> None:
    log = Path("fetched").resolve()
    with pytest.raises(RankFailed, match="the file server is away"):
        start(dataset_fn=lambda: Disturbed(log, range(1, 99), fail), procs=2)
    assert lives() == 1


def stop_until_a_hang_is_suspected() -> None:
    """Stop this rank; a process beside it lets it continue as soon as another rank has dumped its stacks."""
    wait = 'until grep -q "^FAILED" run/logs/rank-*.log; do sleep 0.05; done; kill -CONT $0'
    subprocess.Popen(["sh", "-c", wait, str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_was_stopped_and_continues_is_no_hang(undisturbed: dict) -> None:
    log = Path("fetched").resolve()
    result = start(dataset_fn=lambda: Disturbed(log, [2], stop_until_a_hang_is_suspected), procs=2, hang_timeout_s=3)
    assert outcome(result) == undisturbed
    assert events("restarted") == []


def test_a_hang_costs_a_restart_and_names_who_held_the_others_up(undisturbed: dict) -> None:
    log = Path("fetched").resolve()
    result = start(
        dataset_fn=lambda: Disturbed(log, [3], threading.Event().wait), procs=2, checkpoint=SAVED_AT_ONCE,
        hang_timeout_s=3,
    )  # fmt: skip
    assert outcome(result) == undisturbed
    [restarted] = events("restarted")
    table = Path("run/logs/hang-1.txt").resolve()
    assert re.fullmatch(
        rf"hang: rank \d is in `faults\.py:\d+`; rank \d waits for it in .*; restarting from step \d+ "
        rf"\(restart 1 of 3\); all ranks are in {table}",
        restarted["text"],
    )
    heading = "no rank has made progress for 3 s (hang_timeout_s=3; 0 waits forever)\n  rank  host"
    assert table.read_text().startswith(heading)


def test_a_range_of_processes_takes_what_the_machine_has(undisturbed: dict) -> None:
    cores = os.sched_getaffinity(0)
    result = start(procs="1:4", max_steps=21)
    assert result.world_size == min(4, len(cores))
    assert result.weights_sha256 == undisturbed["weights"]
