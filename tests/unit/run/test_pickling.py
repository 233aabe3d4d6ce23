from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import ConfigError, PicklingError
from paceline.run.pickling import pickle_failure, pickling_error


class Settings:
    """A class of the user, with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def build(self) -> None: ...


def in_main(source: str, **names: Any) -> Callable[..., Any]:
    """The function `f` of a script or a notebook, which is pickled with its globals, not by name."""
    scope = {"__name__": "__main__", **names}
    exec(source, scope)
    function: Callable[..., Any] = scope["f"]
    return function


def path(value: Any) -> str:
    """The path in the error to the part that cannot be pickled."""
    assert pickle_failure(value) is not None
    return str(pickling_error("model_fn", value)).partition(" cannot be pickled for the ranks: it is a lock (")[0]


def test_the_error_names_the_whole_path_the_type_the_reason_and_what_to_do() -> None:
    cfg = Settings(width=3, lock=threading.Lock())
    error = pickling_error("model_fn", lambda: cfg.width)
    assert str(error) == (
        "model_fn → closure 'cfg' → attribute 'lock' cannot be pickled for the ranks: "
        "it is a lock (cannot pickle '_thread.lock' object); create it inside the function instead"
    )
    assert isinstance(error, PicklingError)
    assert isinstance(error, ConfigError)


def test_the_path_goes_through_dicts_lists_and_tuples() -> None:
    parts = {"sizes": [1, 2], "guards": [None, ("x", threading.Lock())]}
    assert path(lambda: parts) == "model_fn → closure 'parts' → key 'guards' → item 1 → item 1"


def test_the_path_goes_through_partials() -> None:
    lock = threading.Lock()
    assert path(functools.partial(print, lock)) == "model_fn → its arguments → item 0"
    assert path(functools.partial(print, 1, at=[lock])) == "model_fn → its arguments → item 1 → key 'at' → item 0"
    assert path(functools.partial(lambda: lock)) == "model_fn → its function → closure 'lock'"


def test_the_path_goes_through_globals_of_a_script() -> None:
    assert path(in_main("def f(): return guard", guard=threading.Lock())) == "model_fn → global 'guard'"


def test_the_path_goes_through_functions_that_a_script_calls() -> None:
    helper = in_main("def f(): return guard", guard=threading.Lock())
    assert path(in_main("def f(): return helper()", helper=helper)) == "model_fn → global 'helper' → global 'guard'"


def test_the_path_goes_through_defaults() -> None:
    lock = threading.Lock()

    def build(width: int = 3, guard: Any = lock) -> None: ...

    assert path(build) == "model_fn → default 1"


def test_the_path_goes_through_the_object_of_a_method() -> None:
    assert path(Settings(lock=threading.Lock()).build) == "model_fn → its object → attribute 'lock'"


def test_the_path_goes_through_attributes_of_a_class() -> None:
    class Local:
        width = 3
        guard = threading.Lock()

    assert path(Local) == "model_fn → attribute 'guard'"


def test_the_path_to_a_value_that_cannot_be_pickled_itself_is_its_key() -> None:
    assert path(threading.Lock()) == "model_fn"


def test_the_path_through_an_object_that_contains_itself_ends() -> None:
    settings = Settings(lock=threading.Lock())
    settings.__dict__ = {"me": settings, **settings.__dict__}
    assert path(settings) == "model_fn → attribute 'lock'"


def test_the_error_of_an_object_that_refuses_pickling_is_quoted() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("refused")

    value = Refuses()
    message = str(pickling_error("train_fn", lambda: value))
    assert message.startswith("train_fn → closure 'value' cannot be pickled for the ranks: it is a Refuses (refused)")


@pytest.mark.parametrize("value", [3, [1, {"a": 2}], lambda: 3, Settings(width=3), Settings.build])
def test_a_value_that_can_be_pickled_has_no_failure(value: Any) -> None:
    assert pickle_failure(value) is None


@pytest.mark.parametrize(
    "source",
    ["def f(): return list(guard for _ in 'ab')", "def f(): return lambda: guard"],
    ids=["generator", "lambda"],
)
def test_the_path_goes_through_globals_used_in_inner_functions(source: str) -> None:
    assert path(in_main(source, guard=threading.Lock())) == "model_fn → global 'guard'"


def test_the_path_goes_through_defaults_of_keywords() -> None:
    lock = threading.Lock()

    def build(*, guard: Any = lock) -> None: ...

    assert path(build) == "model_fn → default 'guard'"


def test_a_closure_over_an_unassigned_name_is_skipped() -> None:
    lock = threading.Lock()

    def build() -> Any:
        return later, lock

    if pickle_failure(lock) is None:
        later = 3
    assert path(build) == "model_fn → closure 'lock'"
