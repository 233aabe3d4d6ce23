"""A run folder that is moved, or deleted, while its run trains."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import Disturbed, events, outcome, saved_steps, start

from paceline.errors import RankFailed


def disturbing(*acts: Callable[[], None]) -> Callable[[], Disturbed]:
    """A data set that does one thing in the first epoch, another in the second, and so on."""
    log, waiting = Path("fetched").resolve(), list(acts)

    def act() -> None:
        waiting[log.stat().st_size - 1]()

    return lambda: Disturbed(log, range(1, len(waiting) + 1), act)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_folder_is_moved_stays_whole_and_restarts_there(run: Any) -> None:
    whole = start(run_dir="whole")
    source, target = Path("run").resolve(), Path("elsewhere").resolve()
    data = disturbing(lambda: shutil.move(source, target), kill)
    result = start(dataset_fn=data, procs=2, checkpoint={"every_steps": 2, "keep": 50})
    assert outcome(result) == outcome(whole)
    assert result.run_dir.resolve() == target
    names = {path.name for path in target.iterdir()}
    assert {"config.yaml", "events.jsonl", "checkpoints", "weights.safetensors", "result.json", "tensorboard"} <= names
    assert "job.bin" not in names
    # A checkpoint may have been due while the folder was not in its place.
    warned = [event["text"] for event in events("warning", target) if "could not be saved" not in event["text"]]
    assert warned == [f"{source} was moved to {target}; the run continues there, through a link in the old place"]
    assert len(events("restarted", target)) == 1
    assert saved_steps(target)[-1] == whole.step
    listed = run("paceline", "checkpoints", "elsewhere")
    assert listed.stdout.count("valid") == len(saved_steps(target)), listed
    assert run("paceline", "status", "elsewhere").stdout.splitlines()[-1].startswith("finished: ")


def test_a_run_whose_folder_is_deleted_reports_what_is_lost_when_a_rank_dies() -> None:
    folder = Path("run").resolve()
    message = f"{folder} was deleted while the run was training, so its ranks cannot be restarted; "
    with pytest.raises(RankFailed) as caught:
        start(dataset_fn=disturbing(lambda: (shutil.rmtree(folder), kill())))
    assert "SIGKILL" in str(caught.value)
    assert str(caught.value).endswith(f"{message}no checkpoint is left; start a new run")
    assert events("restarted") == []


def test_a_run_whose_folder_is_deleted_ends_with_a_result_that_can_be_used(run: Any) -> None:
    whole = start(run_dir="whole")
    folder = Path("run").resolve()
    result = start(dataset_fn=disturbing(lambda: shutil.rmtree(folder)), procs=2)
    assert result.weights_sha256 == whole.weights_sha256
    assert result.load_model() is not None
    assert saved_steps() == [whole.step]
    assert run("paceline", "checkpoints", "run").returncode == 0
