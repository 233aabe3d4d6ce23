"""The variables of a Slurm step."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.launch.slurm import first_host, is_step, tasks_per_node, world_of

# As srun 22.05 sets them for the last of four tasks on two nodes.
STEP = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
}  # fmt: skip


def test_a_task_takes_its_rank_from_its_step() -> None:
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
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4, SLURM_NODEID=1 and SLURM_LOCALID=1 are not valid among 4 tasks"),
        ({"SLURM_LOCALID": "2"}, "are not valid"),
        ({"SLURM_NODEID": "2"}, "are not valid"),
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
