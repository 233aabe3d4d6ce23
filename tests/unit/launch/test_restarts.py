from __future__ import annotations

from typing import Any

import pytest

from paceline import errors
from paceline.launch.restarts import Restarts
from paceline.observe.failures import HANG, MISMATCH, Failure


def failed(error: str = "RuntimeError", text: str = "odd", place: str = "training, step 7", **keys: Any) -> Failure:
    return Failure(
        rank=1, host="here", place=place, error=error, text=text, location=None, log="rank-1.log", time=0.0, **keys
    )


def killed() -> Failure:
    return failed("SIGKILL", "the process was killed", "position unknown", is_killed=True)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_killed_rank_is_started_again_up_to_the_limit(limit: int) -> None:
    restarts = Restarts(limit)
    assert [restarts.allow(killed(), 5) for _ in range(limit + 2)] == [True] * limit + [False] * 2
    assert restarts.used == limit


def test_a_killed_rank_is_started_again_before_the_first_checkpoint_too() -> None:
    restarts = Restarts(2)
    assert [restarts.allow(killed(), -1) for _ in range(3)] == [True, True, False]


def test_restarts_are_counted_anew_whenever_the_run_has_progressed() -> None:
    restarts = Restarts(1)
    assert [restarts.allow(killed(), step) for step in (-1, 5, 10, 15)] == [True] * 4
    assert not restarts.allow(killed(), 15)
    assert not restarts.allow(killed(), 10)  # an older one is no progress
    assert restarts.allow(killed(), 16)
    assert restarts.used == 1


def test_the_first_checkpoint_at_step_0_is_progress() -> None:
    restarts = Restarts(1)
    assert [restarts.allow(killed(), step) for step in (-1, 0, 0)] == [True, True, False]


def test_an_error_before_the_first_checkpoint_is_shown_at_once() -> None:
    assert not Restarts(3).allow(failed(), -1)


@pytest.mark.parametrize("saved_step", [-1, 5])
def test_a_hang_is_tried_again_once_also_before_the_first_checkpoint(saved_step: int) -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(HANG), saved_step)
    assert not restarts.allow(failed(HANG), saved_step)
    assert restarts.allow(failed(HANG, place="training, step 9"), saved_step)


def test_a_hang_while_building_and_collectives_that_do_not_match_would_come_again() -> None:
    assert not Restarts(3).allow(failed(HANG, place="building the data set"), 5)
    assert not Restarts(3).allow(failed(MISMATCH), 5)


def test_an_error_is_tried_again_once() -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(), 5)
    assert not restarts.allow(failed(), 5)


def test_the_same_error_at_the_same_place_is_not_tried_again_whatever_lies_between() -> None:
    restarts = Restarts(9)
    assert restarts.allow(failed(), 5)
    assert restarts.allow(killed(), 5)
    assert not restarts.allow(failed(), 6)  # nor after progress: it is a step that cannot be taken


@pytest.mark.parametrize("other", [{"error": "ValueError"}, {"text": "other"}, {"place": "training, step 8"}])
def test_another_error_or_another_place_is_tried_again(other: dict[str, str]) -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed(), 5)
    assert restarts.allow(failed(**other), 5)


def test_errors_count_against_the_limit() -> None:
    restarts = Restarts(2)
    assert [restarts.allow(failed(text=str(n)), 5) for n in range(3)] == [True, True, False]


OURS = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("error", sorted({*OURS} - {"ReplicasDiffer"}))
def test_what_we_raise_on_purpose_would_come_again(error: str) -> None:
    assert not Restarts(3).allow(failed(error), 5)


def test_a_device_that_computed_wrongly_is_worth_another_try() -> None:
    restarts = Restarts(3)
    assert restarts.allow(failed("ReplicasDiffer"), 5)
    assert not restarts.allow(failed("ReplicasDiffer"), 5)


@pytest.mark.parametrize("place", ["building the data set", "building the model"])
def test_an_error_while_building_is_shown_at_once(place: str) -> None:
    assert not Restarts(3).allow(failed("TypeError", place=place), 5)
    assert Restarts(3).allow(failed("TypeError"), 5)


def test_a_full_disk_is_no_reason_to_train_again() -> None:
    no_room = failed("OSError", "weights.safetensors cannot be written: No space left on device (os error 28)")
    assert not Restarts(3).allow(no_room, 5)
