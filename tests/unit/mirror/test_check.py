"""Mistakes in `checkpoint.mirror` and `resume`, which are found before a run starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

from paceline.config import Config
from paceline.errors import ConfigError, MissingExtra
from paceline.mirror import check
from paceline.mirror.check import check_mirror
from paceline.mirror.place import file_system_of
from support.configs import MANAGED, problems

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:geheim@bucket/runs", "s3://KEY:gehe/im@bucket", "sftp://me:geheim@host/runs",
        "s3://bucket/runs?secret=geheim", "s3://bucket/runs#secret=geheim", "gs://geheim@bucket",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["checkpoint.mirror", "resume"])
def test_credentials_in_a_url_are_rejected_and_not_shown(url: str, key: str) -> None:
    given: dict[str, Any] = {"resume": url} if key == "resume" else {"checkpoint": {"mirror": url}}
    [problem] = problems({**MANAGED, **given})
    assert problem.startswith(f"{key}=")
    assert "give it to the library of the store" in problem
    assert "geheim" not in problem
    assert "gehe/im" not in problem


def test_a_user_name_is_part_of_an_sftp_url(make_config: MakeConfig) -> None:
    url = "sftp://me@host:22/runs"
    assert make_config(checkpoint={"mirror": url}).checkpoint.mirror == url


def test_a_url_that_was_given_as_a_path_keeps_its_slashes(make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"mirror": Path("s3://bucket/runs")}, resume=Path("s3://bucket/runs/x"))
    assert (config.checkpoint.mirror, config.resume) == ("s3://bucket/runs", "s3://bucket/runs/x")


@pytest.mark.parametrize(
    ("mirror", "problem"),
    [
        ("https://host/runs", "can only be read"),
        ("s3://", "names no bucket"),
        ("", "is empty"),
        ("simplecache::s3://KEY:geheim@b/r", "chains several protocols"),
        ("file://me@host/runs", "names a host"),
    ],
)
def test_places_that_cannot_be_mirrors(mirror: str, problem: str) -> None:
    [found] = problems({**MANAGED, "checkpoint": {"mirror": mirror}})
    assert problem in found
    assert "geheim" not in found


def test_a_mirror_in_the_run_folder_is_rejected(make_config: MakeConfig) -> None:
    for run_dir, mirror in ((None, "runs"), ("here", "here"), ("here", "here/copy")):
        with pytest.raises(ConfigError, match="is the run folder or inside it"):
            check_mirror(make_config(run_dir=run_dir, checkpoint={"mirror": mirror}, name="here" if run_dir else "lab"))


def test_a_mirror_that_cannot_be_written_is_rejected(make_config: MakeConfig) -> None:
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.mirror=file/x cannot be written to: .*; give a folder"):
        check_mirror(make_config(checkpoint={"mirror": "file/x"}))


def test_a_missing_package_is_named_with_its_extra(
    hide_package: Callable[[str], None], make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, url, extra in (
        ("s3fs", "s3://b/x", "s3"),
        ("gcsfs", "gs://b/x", "gs"),
        ("paramiko", "sftp://h/x", "sftp"),
    ):
        monkeypatch.delitem(_registry, extra, raising=False)  # another test may have imported it
        hide_package(f"fsspec.implementations.{extra}")
        hide_package(package)
        with pytest.raises(MissingExtra, match=rf"needs {package}; run: pip install 'paceline\[{extra}\]'"):
            file_system_of(url)
    with pytest.raises(ConfigError, match="has an unknown protocol; use s3://"):
        check_mirror(make_config(checkpoint={"mirror": "nothing://b/x"}))


def test_a_store_that_does_not_answer_is_a_warning(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(check, "CHECK_S", 0.01)
    monkeypatch.setattr(check, "_write_and_remove", lambda *_, **__: never.wait(60))
    check_mirror(make_config(checkpoint={"mirror": "disk"}))
    never.set()
    assert "cannot be reached now: no answer within 0.01 s; the run starts" in capsys.readouterr().err
