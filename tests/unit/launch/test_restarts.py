"""After which failures the ranks are restarted, and how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import errors
from paceline.config import Config
from paceline.errors import ConfigError, RankFailed
from paceline.launch.restarts import MAX_RESTARTS, Restarts, final_error, limit_of, loss_of, restart_report
from paceline.observe.failures import HANG, MISMATCH, Failure
from paceline.run.layout import RunFolder


def failed(error: str = "RuntimeError", text: str = "odd", place: str = "training, step 7", **keys: Any) -> Failure:
    return Failure(
        rank=1, host="here", place=place, error=error, text=text, location=None, log="rank-1.log", time=0.0, **keys
    )


def killed() -> Failure:
    return failed("SIGKILL", "the process was killed", "position unknown", is_killed=True)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_killed_rank_is_restarted_up_to_the_limit(limit: int) -> None:
    restarts = Restarts(limit)
    assert [restarts.allow(killed(), 5) for _ in range(limit + 2)] == [True] * limit + [False] * 2
    assert restarts.used == limit


def test_a_killed_rank_is_restarted_also_before_the_first_checkpoint() -> None:
    restarts = Restarts(2)
    assert [restarts.allow(killed(), -1) for _ in range(3)] == [True, True, False]


def test_restarts_are_counted_from_zero_after_progress() -> None:
    restarts = Restarts(1)
    assert [restarts.allow(killed(), step) for step in (-1, 5, 10, 15)] == [True] * 4
    assert not restarts.allow(killed(), 15)
    assert not restarts.allow(killed(), 10)  # an older checkpoint is no progress
    assert restarts.allow(killed(), 16)
    assert restarts.used == 1


def test_the_first_checkpoint_at_step_0_is_progress() -> None:
    restarts = Restarts(1)
    assert [restarts.allow(killed(), step) for step in (-1, 0, 0)] == [True, True, False]


def test_an_error_before_the_first_checkpoint_is_shown_at_once() -> None:
    assert not Restarts(3).allow(failed(), -1)


@pytest.mark.parametrize("saved_step", [-1, 5])
def test_a_hang_is_retried_once_also_before_the_first_checkpoint(saved_step: int) -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(HANG), saved_step)
    assert not restarts.allow(failed(HANG), saved_step)
    assert restarts.allow(failed(HANG, place="training, step 9"), saved_step)


def test_a_hang_while_building_and_mismatched_collectives_are_not_retried() -> None:
    assert not Restarts(3).allow(failed(HANG, place="building the data set"), 5)
    assert not Restarts(3).allow(failed(MISMATCH), 5)


def test_an_error_is_retried_once() -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(), 5)
    assert not restarts.allow(failed(), 5)


def test_the_same_error_at_the_same_place_is_not_retried_even_after_another_failure() -> None:
    restarts = Restarts(9)
    assert restarts.allow(failed(), 5)
    assert restarts.allow(killed(), 5)
    assert not restarts.allow(failed(), 6)  # nor after progress: the step fails every time


@pytest.mark.parametrize("other", [{"error": "ValueError"}, {"text": "other"}, {"place": "training, step 8"}])
def test_another_error_or_another_place_is_retried(other: dict[str, str]) -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(), 5)
    assert restarts.allow(failed(**other), 5)


def test_errors_count_against_the_limit() -> None:
    restarts = Restarts(2)
    assert [restarts.allow(failed(text=str(n)), 5) for n in range(3)] == [True, True, False]


OURS = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("error", sorted({*OURS} - {"ReplicasDiffer"}))
def test_errors_that_paceline_raises_on_purpose_are_not_retried(error: str) -> None:
    assert not Restarts(3).allow(failed(error), 5)


def test_different_replicas_are_retried_once() -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed("ReplicasDiffer"), 5)
    assert not restarts.allow(failed("ReplicasDiffer"), 5)


@pytest.mark.parametrize("place", ["building the data set", "building the model"])
def test_an_error_while_building_is_shown_at_once(place: str) -> None:
    assert not Restarts(3).allow(failed("TypeError", place=place), 5)
    assert Restarts(3).allow(failed("TypeError"), 5)


def test_a_full_disk_is_not_retried() -> None:
    full = failed("OSError", "weights.safetensors cannot be written: No space left on device (os error 28)")
    assert not Restarts(3).allow(full, 5)


@pytest.mark.parametrize(("keys", "managed", "other"), [({}, MAX_RESTARTS, 0), ({"max_restarts": 5}, 5, 5)])
def test_the_limit_is_the_configs_or_follows_from_the_loop(
    keys: dict[str, Any], managed: int, other: int, make_config: Callable[..., Config]
) -> None:
    config = make_config(**keys)
    assert (limit_of(config, can_save=True), limit_of(config, can_save=False)) == (managed, other)


def test_the_report_has_the_failure_the_step_and_the_number_of_the_restart(tmp_path: Path) -> None:
    folder, restarts = RunFolder(tmp_path), Restarts(3)
    (folder.checkpoints / "step-00000005").mkdir(parents=True)
    folder.job.touch()
    assert restarts.allow_in(folder, failed())
    assert restart_report(failed(), folder, restarts.count) == (
        "rank 1 failed (training, step 7): RuntimeError; restarting from step 5 (restart 1 of 3)"
    )


def test_the_final_error_is_that_of_the_rank_or_of_its_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.job.touch()
    assert str(final_error(failed(), folder)) == failed().describe()
    assert isinstance(final_error(failed("ConfigError", "lanes=6 is odd", is_config=True), folder), ConfigError)
    folder.job.unlink()  # with the run folder, which was deleted
    error = final_error(failed(), folder)
    assert isinstance(error, RankFailed)
    assert str(error) == f"{failed().describe()}\n{loss_of(folder, -1)}"


def test_the_loss_with_a_deleted_folder_is_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    text = f"{tmp_path} was deleted while the run was training, so its ranks cannot be restarted; "
    assert loss_of(folder, -1) == f"{text}no checkpoint is left; start a new run"
    assert loss_of(folder, 8) == f"{text}step 8 was saved after that; resume with --resume {tmp_path}"
    folder.job.touch()
    assert loss_of(folder, -1) is None
