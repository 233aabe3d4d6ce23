"""The key that hosts share is created once, is private, and is refused where other users could know it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import Config, build
from paceline.errors import ConfigError
from paceline.launch.cluster.key import key_of

KEY = Path("runs/lab/.key")


def lab() -> Config:
    return build({"train_fn": print, "model_fn": print, "dataset_fn": print, "name": "lab"})


def test_a_key_is_created_once_and_is_private() -> None:
    assert key_of(lab()) == key_of(lab())
    assert len(key_of(lab())) == 32
    assert oct(KEY.stat().st_mode)[-3:] == "600"
    assert [path.name for path in KEY.parent.iterdir()] == [".key"]


def test_a_folder_that_cannot_hold_the_key_is_named() -> None:
    Path("taken").touch()
    keys = {"train_fn": print, "model_fn": print, "dataset_fn": print, "run_dir": "taken"}
    with pytest.raises(ConfigError, match="run_dir=taken cannot store the key that the hosts share: File exists; "):
        key_of(build(keys))


def write(content: bytes, mode: int) -> None:
    KEY.write_bytes(content)
    KEY.chmod(mode)


def link() -> None:
    Path("elsewhere").write_bytes(b"k" * 32)
    Path("elsewhere").chmod(0o600)
    KEY.symlink_to(Path("elsewhere").resolve())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: write(b"", 0o600), "has 0 bytes instead of 32"),
        (lambda: write(b"k" * 33, 0o600), "has 33 bytes instead of 32"),
        (lambda: write(b"k" * 32, 0o644), r"is accessible to other users \(mode 0644\)"),
        (lambda: write(b"k" * 32, 0o620), r"is accessible to other users \(mode 0620\)"),
        (link, "is a link"),
        (lambda: KEY.mkdir(mode=0o700), "is not a regular file"),
        (lambda: os.mkfifo(KEY, 0o600), "is not a regular file"),
    ],
)
def test_a_key_that_others_may_know_is_refused(make: Callable[[], None], what: str) -> None:
    KEY.parent.mkdir(parents=True)
    make()
    with pytest.raises(ConfigError, match=f"^runs/lab/.key {what}, so it cannot be the key of this run; remove it, or"):
        key_of(lab())


def test_a_key_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key_of(lab())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, and this is user {owner + 1}, so it cannot be"):
        key_of(lab())
