"""What all launchers share: the environment, a `.env` file, the choice of a launcher, and the report of an end."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from paceline import Trainer, launch
from paceline.checkpoint.resume import RestorePoint
from paceline.config import Config, build
from paceline.errors import ConfigError, PacelineError, RankFailed, Stopped
from paceline.launch import environment, stopped_error
from paceline.launch.environment import load_dotenv
from paceline.launch.setup import TRAIN, failure_reported, report_new_run
from paceline.observe.events import read
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome
from paceline.trainer import build_config
from support.configs import MANAGED


def test_a_dotenv_file_adds_to_the_environment_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THERE", "before")
    monkeypatch.setenv("NEW", "")
    monkeypatch.delenv("NEW")  # so that it is removed after the test
    (tmp_path / ".env").write_text("THERE=after\nNEW=here\nBARE\n")
    load_dotenv(tmp_path)
    assert [os.environ.get(name) for name in ("THERE", "NEW", "BARE")] == ["before", "here", None]


def test_a_dotenv_file_can_be_edited_between_two_runs_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NEW", "OLD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for content, expected in (("OLD=1\nNEW=1\n", ["1", "1"]), ("NEW=2\n", [None, "2"])):
        (tmp_path / ".env").write_text(content)
        load_dotenv(tmp_path)
        assert [os.environ.get(name) for name in ("OLD", "NEW")] == expected
    monkeypatch.setenv("NEW", "of the user")
    load_dotenv(tmp_path / "elsewhere")
    assert os.environ["NEW"] == "of the user"


def test_a_dotenv_file_makes_no_process_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.PLACE, *environment.ADDRESS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / ".env").write_text("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=n1\nMASTER_PORT=29500\n")
    load_dotenv(tmp_path)
    assert environment.pick_launcher("auto") == "local"
    assert os.environ["MASTER_ADDR"] == "n1"
    monkeypatch.setenv("RANK", "1")  # a rank that was started by hand
    load_dotenv(tmp_path)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert environment.pick_launcher("auto") == "torchrun"


def test_several_hosts_meet_at_the_address_in_the_dotenv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", *environment.ADDRESS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / ".env").write_text("MASTER_ADDR=n1\nMASTER_PORT=29500\n")
    assert build_config({**MANAGED, "nodes": 2}, tmp_path).rendezvous == "n1:29500"
    assert capsys.readouterr().err == "rendezvous=n1:29500, from MASTER_ADDR and MASTER_PORT\n"
    assert build_config({**MANAGED, "nodes": 2, "rendezvous": "n2:1"}, tmp_path).rendezvous == "n2:1"
    assert build_config(MANAGED, tmp_path).rendezvous is None
    monkeypatch.setenv("MASTER_ADDR", "n3")  # the environment precedes the file
    assert build_config({**MANAGED, "nodes": 2}, tmp_path).rendezvous == "n3:29500"
    capsys.readouterr()
    monkeypatch.setenv("RANK", "0")  # what has started the ranks chooses the address
    with pytest.raises(ConfigError, match="nodes and rendezvous belong together"):
        build_config({**MANAGED, "nodes": 2}, tmp_path)
    assert capsys.readouterr().err == ""


def test_an_address_that_a_run_on_one_host_does_not_use_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.report_unused(tmp_path / "other")
    (tmp_path / ".env").write_text("MASTER_ADDR=n1\nWORLD_SIZE=2\nOTHER=3\n")
    environment.report_unused(tmp_path)
    environment.report_unused(tmp_path)
    assert capsys.readouterr().err == (
        f"{tmp_path / '.env'}: MASTER_ADDR, WORLD_SIZE are not used; a run on one host needs no network address, and "
        "procs is the number of its processes\n"
    )


def test_a_dotenv_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"NAME=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env cannot be read \(.*\); write NAME=VALUE lines in UTF-8"):
        load_dotenv(tmp_path)


def test_the_command_that_resumes_a_run_can_be_pasted_into_a_shell() -> None:
    stopped = '{"reason": "SIGTERM", "step": 7, "is_saved": true}'
    error = stopped_error(Outcome(Path("/my runs/a"), "", None, stopped))
    assert isinstance(error, Stopped)
    assert str(error).endswith("resume with --resume '/my runs/a'")


@pytest.mark.parametrize("kind", [RankFailed, ConfigError])
def test_a_failure_is_written_to_the_events(kind: type[PacelineError], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(kind), failure_reported(folder):
        raise kind("lanes=6 is odd")
    with pytest.raises(Stopped), failure_reported(folder):
        raise Stopped("no failure")
    assert [(event["event"], event["text"]) for event in read(folder.events)] == [("run_failed", "lanes=6 is odd")]


# --- launchers of other packages --------------------------------------------------------------------------------------

KEYS = {"train_fn": print, "model_fn": print, "dataset_fn": print}
started: list[tuple[Config, Task]] = []


def start_elsewhere(config: Config, task: Task) -> Outcome:
    """A launcher of another package."""
    started.append((config, task))
    return Outcome(Path("elsewhere"), None, None, '{"reason": "SIGTERM", "step": 7, "is_saved": true}')


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of a package that brings launchers, one of them under a name of Paceline's own."""
    found = [
        EntryPoint("elsewhere", f"{__name__}:start_elsewhere", launch.GROUP),
        EntryPoint("broken", f"{__name__}:no_such_function", launch.GROUP),
        EntryPoint("local", "no_such_module:start", launch.GROUP),
    ]

    def entry_points(**keys: Any) -> list[EntryPoint]:
        return found if keys == {"group": launch.GROUP} else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    started.clear()


@pytest.mark.usefixtures("_installed")
def test_a_run_starts_through_a_launcher_of_another_package() -> None:
    trainer = Trainer(**KEYS, launcher="elsewhere")
    with pytest.raises(Stopped, match="stopped by SIGTERM at step 7; checkpoint saved; resume with --resume elsewhere"):
        trainer.start()
    assert started == [(trainer.config, TRAIN)]


@pytest.mark.usefixtures("_installed")
def test_the_names_of_paceline_keep_their_launchers() -> None:
    assert {name: entry.value for name, entry in launch.launchers().items() if name in launch.LAUNCHERS} == (
        launch.LAUNCHERS
    )


@pytest.mark.usefixtures("_installed")
def test_an_entry_point_without_its_function_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"launcher=broken cannot be loaded: .*no_such_function"):
        Trainer(**KEYS, launcher="broken").start()


@pytest.mark.usefixtures("_installed")
def test_an_unknown_launcher_is_an_error_with_the_known_names() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(**KEYS, launcher="elsewere")
    known = "'auto', 'local', 'torchrun', 'slurm', 'ray', 'elsewhere' or 'broken'"
    assert caught.value.problems == [f"launcher='elsewere' must be {known}"]


def test_a_launcher_that_is_not_installed_any_more_is_an_error_with_the_known_names() -> None:
    config = build(KEYS).model_copy(update={"launcher": "elsewhere"})
    with pytest.raises(ConfigError, match="launcher='elsewhere' must be 'auto', 'local', 'torchrun', "):
        launch.start(config, TRAIN, Path())


def test_that_nothing_was_found_to_resume_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = build_config({**MANAGED, "name": "lab", "resume": "auto"}, tmp_path)
    report_new_run(config, RestorePoint())
    assert capsys.readouterr().err == "resume=auto found no unfinished run in runs/lab; a new run starts\n"
    report_new_run(config, RestorePoint(tmp_path))
    report_new_run(config.model_copy(update={"resume": "never"}), RestorePoint())
    assert capsys.readouterr().err == ""
