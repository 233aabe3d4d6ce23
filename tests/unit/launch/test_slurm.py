"""launch/slurm.py and submit.py: what Slurm's variables mean, and the script that a run is submitted with."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launch.slurm import first_host, is_step, tasks_per_node, world_of
from paceline.observe.events import Events
from paceline.run.layout import RunFolder
from paceline.tools import submit
from paceline.tools.submit import Plan, describe, job_of, script

# As srun 22.05 sets them for the last of four tasks on two nodes.
STEP = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
}  # fmt: skip


def test_a_task_takes_its_place_from_its_step() -> None:
    assert is_step(STEP)
    assert world_of(STEP) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1", "MASTER_PORT": str(20_000 + 7 * 41 + 2),
    }  # fmt: skip


def test_the_job_may_have_other_tasks_than_the_step() -> None:
    assert world_of({**STEP, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"})["WORLD_SIZE"] == "4"


def test_a_task_with_gpus_of_its_own_calls_the_first_of_them_0_and_shares_none() -> None:
    world = world_of({**STEP, "SLURM_GPUS_PER_TASK": "1"})
    assert (world["RANK"], world["LOCAL_RANK"], world["LOCAL_WORLD_SIZE"]) == ("3", "0", "1")


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_and_a_single_task_start_their_ranks_themselves(variables: dict[str, str]) -> None:
    assert not is_step(variables)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4, SLURM_NODEID=1 and SLURM_LOCALID=1 are not a place among 4 tasks"),
        ({"SLURM_LOCALID": "2"}, "not a place"),
        ({"SLURM_NODEID": "2"}, "not a place"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS=6 but SLURM_STEP_TASKS_PER_NODE=2(x2) has 4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two cannot be read"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x is not a number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_contradictions_are_errors(changes: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world_of({**STEP, **changes})
    assert text in str(caught.value)


def test_lists_of_nodes_and_tasks() -> None:
    assert tasks_per_node("2(x2),1,3(x1)") == [2, 2, 1, 3]
    names = {"n1": "n1", "n[1-2]": "n1", "gpu[003-006,9],login1": "gpu003", "a,b[1-2]": "a", "r[1-2]-x": "r1-x"}
    assert {nodes: first_host(nodes) for nodes in names} == names


def test_a_run_is_described_by_its_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert describe(folder) == ["the run has not begun yet"]
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


def test_a_job_that_ended_before_its_run_began_is_described_by_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.slurm.write_text('{"job": "41"}')
    monkeypatch.setattr(submit, "state_of", lambda job: "PENDING (Resources)")
    assert describe(folder) == ["job 41: PENDING (Resources)", "the run has not begun yet"]
    monkeypatch.setattr(submit, "state_of", lambda job: "FAILED")
    assert (
        describe(folder)[1] == f"the run did not begin, and {folder.job_log} cannot be read: No such file or directory"
    )
    folder.logs.mkdir()
    folder.job_log.write_text("line\n" * 20 + "python: not found\n\n")
    *_, before, last = shown = describe(folder)
    assert shown[:2] == ["job 41: FAILED", f"the run did not begin; the end of {folder.job_log}:"]
    assert (before, last, len(shown)) == ("  line", "  python: not found", 2 + submit.LAST_LINES)


def test_a_run_with_its_own_loop_is_not_told_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: lab\ntrain_fn: train:train\n")
    with closing(Events(folder.events)) as events:
        events.write("run_started", name="lab", world_size=2)
    assert (
        describe(folder)[-1]
        == "not running; it has its own loop (train_fn); --resume auto starts it from the beginning"
    )


def test_the_script_is_valid_and_asks_for_what_was_wanted() -> None:
    plan = Plan(nodes=2, gpus_per_node=8, time="4:00:00", partition="gpu", options=["--account=lab"])
    text = script(
        plan, "mnist", ["/shared/my lab/config.yaml", "optimizer.lr=1e-3"], RunFolder(Path("/shared/runs/mnist/1"))
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True).stderr == ""
    lines = [line.replace('"', "") for line in text.splitlines() if line.startswith("#SBATCH ")]
    asked = [line.removeprefix("#SBATCH ") for line in lines]
    assert asked == [
        "--job-name=mnist", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=4:00:00",
        "--partition=gpu", "--signal=B:USR1@120", "--output=/shared/runs/mnist/1/logs/slurm.log", "--open-mode=append",
        "--requeue", "--account=lab",
    ]  # fmt: skip
    assert "train '/shared/my lab/config.yaml' optimizer.lr=1e-3 --run-dir /shared/runs/mnist/1 --resume auto" in text
    assert '--nodes 2 --rendezvous "$head:$port"' in text
    assert "--rendezvous" not in script(Plan(), "mnist", ["config.yaml"], RunFolder(Path("/shared/runs/mnist/1")))


@pytest.mark.parametrize(
    ("name", "plan", "folder"),
    [
        ("lab\n#SBATCH --uid=root", Plan(), "/runs/1"),
        ("lab", Plan(partition="gpu\n#SBATCH --uid=root"), "/runs/1"),
        ("lab", Plan(time='4:00:00" --uid="root'), "/runs/1"),
        ("lab", Plan(options=["--account=lab\n\nrm -r /"]), "/runs/1"),
        ("lab", Plan(), "/runs/1\n#SBATCH --uid=root"),
    ],
)
def test_what_would_be_more_than_one_option_of_sbatch_is_refused(name: str, plan: Plan, folder: str) -> None:
    with pytest.raises(ConfigError, match="cannot be an option of sbatch; remove its line breaks, quotes and"):
        script(plan, name, ["config.yaml"], RunFolder(Path(folder)))


@pytest.mark.parametrize("content", ['{"job": "--user=root"}', '{"job": "12 13"}', '{"job": "١٢"}', "{}", "[]", ""])
def test_only_the_number_of_a_job_is_handed_to_slurm(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.slurm.write_text(content)
    with pytest.raises(ConfigError, match=r"slurm\.json holds no number of a Slurm job; "):
        job_of(folder)
    folder.slurm.write_text('{"job": "4711"}')
    assert job_of(folder) == "4711"
