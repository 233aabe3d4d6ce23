"""`paceline watch`: a run that another process has started."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PACELINE = Path(sys.executable).parent / "paceline"


@pytest.fixture(scope="module")
def finished(run_in: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the recipe linear."""
    folder = tmp_path_factory.mktemp("linear")
    ended = run_in(folder, "paceline", "train", "linear", "num_epochs=1", "--run-dir", "run")
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def test_a_run_is_shown_from_its_folder_until_it_ends(run: Run, tmp_path: Path) -> None:
    training = subprocess.Popen(
        [PACELINE, "train", "digits", "num_epochs=2", "--run-dir", "run"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "run" / "config.yaml").exists():
        assert training.poll() is None
        time.sleep(0.05)
    watched = run("paceline", "watch", "run")
    assert watched.returncode == 0, watched.stderr
    shown = [line for line in training.communicate()[1].splitlines() if "train_loss" in line]
    assert len(shown) == 2
    assert [line for line in watched.stderr.splitlines() if "train_loss" in line] == shown
    logs = run("paceline", "logs", "run")  # the ranks have printed nothing
    assert "rank-0.log is empty: nothing has been printed yet" in logs.stderr
    assert [line for line in logs.stdout.splitlines() if "train_loss" in line] == shown
    assert logs.stdout.splitlines()[-1].startswith("done: step 46  val_loss ")
    again = run("paceline", "watch", "run")  # one that has ended
    assert "1 rank on cpu" in again.stderr
    assert again.stderr.splitlines()[-1].startswith("done: step 46  val_loss ")


def test_ctrl_c_ends_the_view_and_not_the_run(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_text().splitlines()
    events.write_text("\n".join(lines[:-1]) + '\n{"event": "torn')  # as if it still ran
    (tmp_path / "run" / "result.json").unlink()
    with subprocess.Popen([PACELINE, "watch", "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stderr is not None
            assert "1 rank on cpu" in watching.stderr.readline()
            time.sleep(0.3)
            assert watching.poll() is None
            watching.send_signal(signal.SIGINT)
            output = watching.communicate(timeout=20)[1]
            assert "stopped watching; the run itself is not affected" in output
            assert "stopped by" not in output
        finally:
            watching.kill()


def test_a_failed_run_is_reported_and_the_view_ends(run: Run) -> None:
    failed = run("paceline", "train", "linear", "dataset_args.input_size=7", "--run-dir", "run")
    assert failed.returncode == 2
    watched = run("paceline", "watch", "run")
    assert watched.returncode == 0
    assert "gets an input of shape" in watched.stderr
    assert "failed: the model (Linear) gets an input" in run("paceline", "status", "run").stdout


def test_the_newest_run_is_the_default(run: Run, finished: Path, tmp_path: Path) -> None:
    nothing = run("paceline", "status")
    assert nothing.returncode == 2
    assert "the folder runs contains no run" in nothing.stderr
    shutil.copytree(finished, tmp_path / "runs" / "older" / "2026-01-02_10-00-00")
    ended = run("paceline", "train", "linear", "name=newer", "num_epochs=1")
    assert ended.returncode == 0, ended.stderr
    [newest] = (tmp_path / "runs" / "newer").iterdir()
    for command in ("status", "watch", "logs", "report"):
        ended = run("paceline", command)
        assert ended.returncode == 0, ended.stderr
        assert f"using the newest run: {newest.relative_to(tmp_path)}" in ended.stderr
    assert newest.name in (tmp_path / "report.html").read_text()


def test_a_folder_without_a_run_is_refused(run: Run) -> None:
    refused = run("paceline", "watch", "nothing")
    assert refused.returncode == 2
    assert "nothing is not a run folder" in refused.stderr
