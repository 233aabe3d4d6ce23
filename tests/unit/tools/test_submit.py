"""The script that a run is submitted with, and the status of a submitted run."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.observe.events import Events
from paceline.run.layout import RunFolder
from paceline.tools import submit
from paceline.tools.submit import JobRequest, describe, job_of, script


def test_a_run_is_described_by_its_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert describe(folder) == ["the run has not started yet"]
    with closing(Events(folder.events)) as events:
        events.write("run_started", name="lab", world_size=2)
        events.write("step", step=10, steps=None, epoch=1, loss=None)  # no sample of it was finite
    assert describe(folder)[1:] == ["step 10 of ?, epoch 1, loss -", "not running; resume it with --resume auto"]
    with closing(Events(folder.events)) as events:
        events.write("run_stopped", step=10)  # by another version, or damaged
    assert describe(folder)[-1] == "not running, stopped by ?; resume it with --resume auto"
    with closing(Events(folder.events)) as events:
        events.write("epoch", epoch=1, step=12, train_loss=0.5, accuracy=0.75)
        events.write("restarted", text="rank 1 failed")
    folder.result.write_text(
        '{"step": 12, "metrics": {"accuracy": 0.75}, "weights_sha256": "0123456789abcdef", "ema_sha256": null}'
    )
    assert describe(folder)[2:] == [
        "train_loss 0.5000  accuracy 0.7500", "restarted 1 times, last: rank 1 failed",
        "finished: step 12  accuracy 0.7500  weights 0123456789ab",
    ]  # fmt: skip


def test_a_job_that_ended_before_its_run_started_is_described_by_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.slurm.write_text('{"job": "41"}')
    monkeypatch.setattr(submit, "state_of", lambda job: "PENDING (Resources)")
    assert describe(folder) == ["job 41: PENDING (Resources)", "the run has not started yet"]
    monkeypatch.setattr(submit, "state_of", lambda job: "FAILED")
    assert (
        describe(folder)[1] == f"the run did not start, and {folder.job_log} cannot be read: No such file or directory"
    )
    folder.logs.mkdir()
    folder.job_log.write_text("line\n" * 20 + "python: not found\n\n")
    *_, before, last = shown = describe(folder)
    assert shown[:2] == ["job 41: FAILED", f"the run did not start; the end of {folder.job_log}:"]
    assert (before, last, len(shown)) == ("  line", "  python: not found", 2 + submit.LAST_LINES)


def test_the_status_of_your_own_loop_does_not_offer_to_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: lab\ntrain_fn: train:train\n")
    with closing(Events(folder.events)) as events:
        events.write("run_started", name="lab", world_size=2)
    assert (
        describe(folder)[-1]
        == "not running; it has its own loop (train_fn) and no checkpoint; --resume auto starts it from the beginning"
    )


def test_the_script_is_valid_bash_with_the_requested_options() -> None:
    wanted = JobRequest(nodes=2, gpus_per_node=8, time="4:00:00", partition="gpu", options=["--account=lab"])
    text = script(
        wanted, "mnist", ["/shared/my lab/config.yaml", "optimizer.lr=1e-3"], RunFolder(Path("/shared/runs/mnist/1"))
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True).stderr == ""
    lines = [line.replace('"', "") for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = [line.removeprefix("#SBATCH ") for line in lines]
    assert options == [
        "--job-name=mnist", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=4:00:00",
        "--partition=gpu", "--signal=B:USR1@120", "--output=/shared/runs/mnist/1/logs/slurm.log", "--open-mode=append",
        "--requeue", "--account=lab",
    ]  # fmt: skip
    assert "train '/shared/my lab/config.yaml' optimizer.lr=1e-3 --run-dir /shared/runs/mnist/1 --resume auto" in text
    assert '--nodes 2 --rendezvous "$head:$port"' in text
    assert "--rendezvous" not in script(JobRequest(), "mnist", ["config.yaml"], RunFolder(Path("/shared/runs/mnist/1")))


@pytest.mark.parametrize(
    ("name", "wanted", "folder"),
    [
        ("lab\n#SBATCH --uid=root", JobRequest(), "/runs/1"),
        ("lab", JobRequest(partition="gpu\n#SBATCH --uid=root"), "/runs/1"),
        ("lab", JobRequest(time='4:00:00" --uid="root'), "/runs/1"),
        ("lab", JobRequest(options=["--account=lab\n\nrm -r /"]), "/runs/1"),
        ("lab", JobRequest(), "/runs/1\n#SBATCH --uid=root"),
    ],
)
def test_values_that_would_add_options_to_sbatch_are_refused(name: str, wanted: JobRequest, folder: str) -> None:
    with pytest.raises(ConfigError, match="cannot be an option of sbatch; remove its line breaks, quotes and"):
        script(wanted, name, ["config.yaml"], RunFolder(Path(folder)))


@pytest.mark.parametrize("content", ['{"job": "--user=root"}', '{"job": "12 13"}', '{"job": "١٢"}', "{}", "[]", ""])
def test_only_a_job_number_is_passed_to_slurm(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.slurm.write_text(content)
    with pytest.raises(ConfigError, match=r"slurm\.json does not contain a Slurm job ID; "):
        job_of(folder)
    folder.slurm.write_text('{"job": "4711"}')
    assert job_of(folder) == "4711"
