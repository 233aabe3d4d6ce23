"""The variables of ranks that `srun` has started, one task per rank, from the variables of its step (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import ConfigError

FIRST_PORT, PORTS = 20_000, 20_000
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def is_step(variables: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks; a batch script and a single task are not."""
    return int(variables.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def world_of(variables: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and so on of this task, or a ConfigError if Slurm's variables contradict each other."""
    rank, local_rank, node, size = (
        _number(variables, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
    )
    layout = tasks_per_node(_text(variables, "SLURM_STEP_TASKS_PER_NODE"))
    if sum(layout) != size:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={size} but SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']} has "
            f"{sum(layout)}; start the ranks with srun, in a separate step"
        )
    if not (rank < size and node < len(layout) and local_rank < layout[node]):
        raise ConfigError(
            f"SLURM_PROCID={rank}, SLURM_NODEID={node} and SLURM_LOCALID={local_rank} are not valid among {size} "
            f"tasks on {len(layout)} nodes; start the ranks with srun, in a separate step"
        )
    # A task with a single visible device calls it 0, and shares it with no other task.
    own, neighbours = (0, 1) if "SLURM_GPUS_PER_TASK" in variables else (local_rank, layout[node])
    key = 7 * _number(variables, "SLURM_JOB_ID") + int(variables.get("SLURM_STEP_ID") or 0)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(own),
        "LOCAL_WORLD_SIZE": str(neighbours),
        "MASTER_ADDR": first_host(_text(variables, "SLURM_STEP_NODELIST")),
        "MASTER_PORT": str(FIRST_PORT + key % PORTS),
    }


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node: [2, 2, 1] for "2(x2),1"."""
    found = [TASKS.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text} cannot be read; start the ranks with srun")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))]


def first_host(nodes: str) -> str:
    """The first host of a list such as "gpu[003-006,9],login1"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes} cannot be read; start the ranks with srun")
    return "".join(filter(None, match.groups()))


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(f"{name} is not set, but srun sets it for every task; start the ranks with srun")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is not a number; start the ranks with srun")
    return int(text)
