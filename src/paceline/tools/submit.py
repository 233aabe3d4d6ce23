"""A run as a Slurm job: the script that trains, saves in time and comes again; and what has become of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.formatting import ranks_text
from paceline.observe.event_types import complete
from paceline.observe.events import damage_text, read
from paceline.run.atomic_files import write_json, write_text
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.summary import result_text, resume_hint

# In every task: one that is killed starts again, and the hosts find each other again.
TASK = """asked=
trap asked=yes USR1 TERM
while :; do
    "$@"; code=$?
    [ "$code" -lt 128 ] && exit "$code"
    [ -n "$asked" ] && exit 3  # it could not hear yet
    sleep 1
done"""


LAST_LINES = 10  # of a job's output
ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED", "PREEMPTED")


@dataclass(frozen=True)
class Plan:
    """What to ask Slurm for."""

    nodes: int = 1
    gpus_per_node: int | None = None
    procs: str | None = None  # on each node
    time: str | None = None
    partition: str | None = None
    notice_s: int = 120  # before the time limit
    max_requeues: int = 100
    options: Sequence[str] = ()  # of sbatch, as they are


def script(plan: Plan, name: str, words: Sequence[str], folder: RunFolder) -> str:
    """The batch script of `paceline train WORDS` (pure)."""
    asked = {
        "job-name": name,
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": plan.gpus_per_node,
        "time": plan.time,
        "partition": plan.partition,
        "signal": f"B:USR1@{plan.notice_s}",
        "output": folder.job_log,
        "open-mode": "append",
    }
    head = [_directive(f"--{key}", value) for key, value in asked.items() if value is not None]
    head += [_directive(option) for option in ("--requeue", *plan.options)]
    command = [sys.executable, "-m", "paceline", "train", *words, "--run-dir", str(folder.path), "--resume", "auto"]
    command += ["--procs", plan.procs] if plan.procs is not None else []
    meeting = f' --nodes {plan.nodes} --rendezvous "$head:$port"' if plan.nodes > 1 else ""
    return f"""#!/bin/bash
# Written by `paceline submit`: one task a node, which starts its ranks.
{chr(10).join(head)}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=0 --wait=0 bash -c {shlex.quote(TASK)} task \\
    {shlex.join(command)}{meeting} &
step=$!

# A little before the time limit Slurm sends USR1. The run saves and ends with code 3, and the job is queued again.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
wait "$step" 2>/dev/null; last=$?
[ "$last" = 127 ] || code=$last  # 127: the loop has seen its end

# The same after a preemption, but not after scancel: then the job does not run any more.
state=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T)
if [ "$code" = 3 ] && [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {plan.max_requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _directive(option: str, value: object = None) -> str:
    """The line of one option of sbatch: as the user gave it, or with a value in quotes."""
    text = option if value is None else f'{option}="{value}"'
    if not text.isprintable() or (value is not None and set(str(value)) & {'"', "\\"}):
        raise ConfigError(f"{text!r} cannot be an option of sbatch; remove its line breaks, quotes and backslashes")
    return f"#SBATCH {text}"


def submit(text: str, folder: RunFolder) -> str:
    """Hand a batch script to Slurm; the number of the job."""
    if (job := job_of(folder)) is not None and (state := state_of(job)).startswith(ALIVE):
        raise ConfigError(f"{folder.path} is job {job} already, {state}; cancel it first, or choose another run_dir")
    folder.logs.mkdir(parents=True, exist_ok=True)
    write_text(folder.job_script, text)
    job = _slurm("sbatch", "--parsable", str(folder.job_script)).partition(";")[0].strip()
    write_json(folder.slurm, {"job": job})
    return job


def job_of(folder: RunFolder) -> str | None:
    """The number of a run's Slurm job, if it was submitted."""
    if not folder.slurm.exists():
        return None
    try:
        job = str(json.loads(folder.slurm.read_text(encoding="utf-8"))["job"])
    except (ValueError, KeyError, TypeError):
        job = ""
    if not re.fullmatch("[0-9]+", job):  # it becomes an argument of Slurm's commands
        raise ConfigError(f"{folder.slurm} holds no number of a Slurm job; remove it, and use Slurm's own commands")
    return job


def state_of(job: str) -> str:
    """What Slurm says of a job, in a few words."""
    told = _slurm("scontrol", "--oneliner", "show", "job", job, may_fail=True)
    facts = dict(re.findall(r"(\w+)=(\S*)", told))
    if "JobState" not in facts:
        ended = _slurm("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State",
                       may_fail=True)  # fmt: skip
        return ended.strip().splitlines()[-1] if ended.strip() else "not known to Slurm any more"
    state, requeued = facts["JobState"], int(facts.get("Restarts") or 0)
    words = [state]
    if state == "PENDING" and facts.get("Reason") not in (None, "None"):
        words.append(f"({facts['Reason']})")
    if state == "RUNNING":
        words.append(f"for {facts.get('RunTime')} of {facts.get('TimeLimit')} on {facts.get('NodeList')}")
    return " ".join(words) + (f", requeued {requeued} times" if requeued else "")


def describe(folder: RunFolder) -> list[str]:
    """How a run is doing, a line each: its job, how far it is, how it ended."""
    job, lines = job_of(folder), []
    is_over = False
    if job is not None:
        state = state_of(job)
        lines, is_over = [f"job {job}: {state}"], not state.startswith(ALIVE)
    damaged: list[int] = []
    events = list(read(folder.events, damaged)) if folder.events.exists() else []
    if damaged:
        lines.append(damage_text(damaged))
    if not events:
        return [*lines, *(_end_of_log(folder) if is_over else ["the run has not begun yet"])]
    last = {event["event"]: complete(event) for event in events}
    started, step, epoch = last.get("run_started", {}), last.get("step"), last.get("epoch")
    lines.append(f"{started.get('name')}: {ranks_text(started.get('world_size', 1))}, {_ago(events[-1]['time'])}")
    if step is not None:
        loss = "-" if step["loss"] is None else f"{step['loss']:.4f}"
        lines.append(f"step {step['step']} of {step['steps'] or '?'}, epoch {step['epoch']}, loss {loss}")
    if epoch is not None:
        facts = {name: value for name, value in epoch.items() if isinstance(value, float) and name != "time"}
        lines.append("  ".join(f"{name} {value:.4f}" for name, value in facts.items()))
    restarts = sum(event["event"] == "restarted" for event in events)
    if restarts:
        lines.append(f"restarted {restarts} times, last: {last['restarted']['text']}")
    if (outcome := result_text(folder)) is not None:
        return [*lines, f"finished: {outcome}"]
    if events[-1]["event"] == "run_failed" and not is_locked(folder):
        return [*lines, f"failed: {events[-1]['text']}"]
    stopped = f", stopped by {complete(events[-1])['reason']}" if events[-1]["event"] == "run_stopped" else ""
    return [*lines, "running" if is_locked(folder) else f"not running{stopped}; {resume_hint(folder)}"]


def _end_of_log(folder: RunFolder) -> list[str]:
    """Why a job may have ended before its run began, in the last words of its output."""
    try:
        written = folder.job_log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"the run did not begin, and {folder.job_log} cannot be read: {error.strerror}"]
    last = [line for line in written if line.strip()][-LAST_LINES:]
    return [f"the run did not begin; the end of {folder.job_log}:", *(f"  {line}" for line in last)]


def _ago(moment: float) -> str:
    return f"last word {max(0.0, time.time() - moment):.0f} s ago"


def cancel(job: str) -> None:
    """End a job; its run saves first, as far as Slurm gives it the time."""
    _slurm("scancel", job)


def _slurm(*command: str, may_fail: bool = False) -> str:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; use a machine from which Slurm jobs are submitted")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode and not may_fail:
        raise PacelineError(f"{command[0]}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


def find_log(folder: RunFolder, rank: int | None) -> Path:
    """What a person wants to read of a run: the job's output, or that of a rank."""
    path = folder.log(rank) if rank is not None else folder.job_log
    if rank is None and not path.exists():
        path = folder.log(0)
    if not path.exists():
        raise ConfigError(f"{path} does not exist; the run has not begun yet, or has no such rank")
    return path
