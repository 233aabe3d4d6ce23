"""Real Slurm over two hosts: a submitted run gives the weights of one process, whatever Slurm does to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab import PACELINE, Lab, Slurm, is_rank, outcome, processes_with, rank_of, release, until

import paceline as paceline_package

RUN = Path("run")
JOB_LOG = RUN / "logs" / "slurm.log"
# A line of the project's train.py, and what the loop does there: it waits in its second epoch while `hold` exists.
LOGS = "            run.log(loss=loss)\n"
HOLDS = """            if run.step_number == 30:
                pathlib.Path("held").touch()
                while pathlib.Path("hold").exists():
                    time.sleep(0.02)
"""


def paceline(*words: str) -> str:
    ended = subprocess.run([PACELINE, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def submit(*options: str) -> str:
    """Submit the work to two nodes; the number of the job."""
    printed = paceline("submit", "config.yaml", "--nodes", "2", "--procs", "1", "--time", "10", *options)
    return printed.partition("job ")[2].partition(",")[0]


def held_job(*options: str) -> str:
    """A job that has saved a few checkpoints and waits in the middle of an epoch."""
    Path("hold").touch()
    job = submit(*options)
    until(Path("held").exists)
    return job


def state(slurm: Slurm, job: str) -> dict[str, str]:
    shown = slurm.ask("scontrol", "--oneliner", "show", "job", job)
    return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)  # type: ignore[misc]


def wait_for(slurm: Slurm, job: str, *states: str) -> None:
    until(lambda: state(slurm, job).get("JobState") in states, timeout_s=120)


def log() -> str:
    return JOB_LOG.read_text(errors="replace")


def test_a_job_that_is_asked_to_save_is_requeued_and_gives_the_same_weights(
    slurm: Slurm, expected: dict[str, object]
) -> None:
    job = held_job()
    shown = paceline("status", "run")
    assert f"job {job}: RUNNING" in shown
    assert "step 14 of 35" in shown
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    release()
    wait_for(slurm, job, "COMPLETED")
    assert state(slurm, job)["Restarts"] == "1"
    assert outcome(Path()) == expected
    assert "stopped by SIGUSR1" in log()
    shown = paceline("status", "run")
    assert "requeued 1 times" in shown
    assert "finished" in shown
    assert "2 ranks on cpu" in paceline("logs", "run")


@pytest.mark.long
def test_a_job_is_not_requeued_more_often_than_allowed(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my lab").mkdir()
    for name in ("work.py", "config.yaml"):
        Path(name).rename(Path("my lab", name))
    monkeypatch.chdir("my lab")
    job = held_job("--max-requeues", "0")
    twice = subprocess.run([PACELINE, "submit", "config.yaml"], capture_output=True, text=True, check=False)
    assert twice.returncode == 2
    assert f"already belongs to job {job}, RUNNING" in twice.stderr
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    release()
    wait_for(slurm, job, "FAILED")
    assert state(slurm, job)["Restarts"] == "0"
    assert "not running, stopped by SIGUSR1" in paceline("status", "run")


def test_the_status_of_a_job_that_fails_before_its_run_begins_shows_the_cause(slurm: Slurm) -> None:
    job = submit("--sbatch=--hold")
    assert paceline("status", "run").splitlines()[-1] == "the run has not started yet"
    Path("config.yaml").unlink()
    slurm.ask("scontrol", "release", job)
    wait_for(slurm, job, "FAILED")
    shown = paceline("status", "run")
    assert "the run did not start; the end of" in shown
    assert "config.yaml is neither a file nor a recipe" in shown


def test_a_job_that_is_cancelled_saves_and_is_not_requeued(slurm: Slurm, expected: dict[str, object]) -> None:
    job = held_job()
    paceline("cancel", "run")
    release()
    wait_for(slurm, job, "CANCELLED")
    until(lambda: not processes_with(str(Path.cwd())))
    assert "stopped by SIGTERM" in log()
    assert state(slurm, job)["Restarts"] == "0"
    job = submit()  # the same folder: the run is resumed
    wait_for(slurm, job, "COMPLETED")
    assert outcome(Path()) == expected
    assert "resuming from step" in log()


@pytest.mark.long
def test_a_job_that_is_preempted_saves_and_is_requeued(slurm: Slurm, expected: dict[str, object]) -> None:
    job = held_job("--sbatch=--exclusive")
    other = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    )
    until(lambda: state(slurm, job).get("PreemptTime", "None") != "None" or "SIGTERM" in log(), timeout_s=60)
    release()
    wait_for(slurm, other, "COMPLETED")
    wait_for(slurm, job, "COMPLETED")
    assert outcome(Path()) == expected
    assert "resuming from step" in log()


@pytest.mark.long
@pytest.mark.parametrize("which", ["rank", "task"])
def test_a_process_that_is_killed_in_a_job_is_restarted(slurm: Slurm, expected: dict[str, object], which: str) -> None:
    job = held_job()
    pid = rank_of(1)
    if which == "task":  # the command itself, on the second node, and all its processes with it
        pid = next(
            pid
            for pid in processes_with("--rendezvous")
            if os.getpgid(pid) != os.getpgid(rank_of(0)) and _is_agent(pid)
        )
    os.kill(pid, signal.SIGKILL)
    release()
    wait_for(slurm, job, "COMPLETED")
    assert outcome(Path()) == expected


@pytest.mark.long
def test_a_job_of_a_node_that_fails_is_requeued(lab: Lab, slurm: Slurm, expected: dict[str, object]) -> None:
    job = held_job()
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    until(lambda: not [pid for pid in processes_with(str(Path.cwd())) if is_rank(pid, 0) or is_rank(pid, 1)])
    slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    release()
    wait_for(slurm, job, "COMPLETED")
    assert outcome(Path()) == expected


@pytest.mark.long
def test_the_script_that_init_writes_does_the_same_by_hand(slurm: Slurm, expected: dict[str, object]) -> None:
    text = (Path(paceline_package.__file__).parent / "templates" / "project" / "train.slurm").read_text()
    Path("train.slurm").write_text(text.replace("paceline train", f"{PACELINE} train"))
    Path("hold").touch()
    job = slurm.ask("sbatch", "--parsable", "train.slurm")
    until(Path("held").exists)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    release()
    wait_for(slurm, job, "COMPLETED")
    assert state(slurm, job)["Restarts"] == "1"
    Path(f"runs/job-{job}").rename("run")
    assert outcome(Path()) == expected


@pytest.fixture
def project(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project that `paceline init` writes, as the working folder; jobs find the command."""
    monkeypatch.setenv("PATH", f"{PACELINE.parent}:{os.environ['PATH']}")
    paceline("init", "x")
    monkeypatch.chdir("x")


@pytest.mark.usefixtures("project")
def test_the_project_of_init_trains_as_a_job_by_its_script_and_by_submit(slurm: Slurm) -> None:
    by_hand = slurm.ask("sbatch", "--parsable", "train.slurm")
    submitted = submit_project()
    for job, log_file in ((by_hand, f"slurm-{by_hand}.log"), (submitted, JOB_LOG)):
        wait_for(slurm, job, "COMPLETED", "FAILED")
        assert state(slurm, job)["JobState"] == "COMPLETED", Path(log_file).read_text()
    assert weights(Path(f"runs/job-{by_hand}")) == weights(RUN)


@pytest.mark.long
@pytest.mark.usefixtures("project")
def test_the_project_of_init_resumes_after_a_requeue_by_its_script(slurm: Slurm) -> None:
    paceline("train", "config.yaml", "--run-dir", "undisturbed", "--procs", "1")
    train = Path("train.py")
    train.write_text(f"import pathlib\nimport time\n{train.read_text().replace(LOGS, LOGS + HOLDS)}")
    Path("hold").touch()
    job = slurm.ask("sbatch", "--parsable", "train.slurm")
    until(Path("held").exists)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    release()
    wait_for(slurm, job, "COMPLETED", "FAILED")
    written = Path(f"slurm-{job}.log").read_text()
    assert state(slurm, job)["JobState"] == "COMPLETED", written
    assert state(slurm, job)["Restarts"] == "1"
    assert "resuming from step" in written
    assert weights(Path(f"runs/job-{job}")) == weights(Path("undisturbed"))


def weights(run: Path) -> str:
    """The hash of a run's weights."""
    return str(json.loads((run / "result.json").read_text())["weights_sha256"])


def submit_project() -> str:
    """Submit the project in the working folder; the number of the job."""
    return paceline("submit", "config.yaml", "--run-dir", "run").partition("job ")[2].partition(",")[0]


def test_srun_may_start_the_ranks_itself(slurm: Slurm, expected: dict[str, object]) -> None:
    command = f"srun {PACELINE} train config.yaml"
    job = slurm.ask("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--output=out", f"--wrap={command}")
    wait_for(slurm, job, "COMPLETED")
    assert outcome(Path()) == expected
    assert "4 ranks on cpu" in Path("out").read_text()


def _is_agent(pid: int) -> bool:
    """Whether a process is the command on the second node."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return (
        words[1:4] == [b"-m", b"paceline", b"train"] and b"SLURM_NODEID=1" in Path(f"/proc/{pid}/environ").read_bytes()
    )
