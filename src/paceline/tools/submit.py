"""Runs as Slurm jobs: the batch script, which saves before the time limit and requeues itself; and the status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.formatting import ranks_text
from paceline.observe.event_types import Event, complete
from paceline.observe.events import damage_text, read
from paceline.run.atomic_files import write_json, write_text
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.summary import result_text, resume_hint

# In every task: restarts a command that is killed, which then rejoins the other hosts.
TASK = """asked=
trap asked=yes USR1 TERM
while :; do
    "$@"; code=$?
    [ "$code" -lt 128 ] && exit "$code"
    [ -n "$asked" ] && exit 3  # a stop was requested before the command handled signals
    sleep 1
done"""
LAST_LINES = 10  # of the output of a job that failed
UNFINISHED = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED", "PREEMPTED")


@dataclass(frozen=True)
class JobRequest:
    """The request to Slurm."""

    nodes: int = 1
    gpus_per_node: int | None = None
    procs: str | None = None  # on each node
    time: str | None = None
    partition: str | None = None
    notice_s: int = 120  # before the time limit
    max_requeues: int = 100
    options: Sequence[str] = ()  # further options of sbatch


def script(request: JobRequest, name: str, words: Sequence[str], folder: RunFolder) -> str:
    """The batch script of `paceline train WORDS` (pure)."""
    options = {
        "job-name": name,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node,
        "time": request.time,
        "partition": request.partition,
        "signal": f"B:USR1@{request.notice_s}",
        "output": folder.job_log,
        "open-mode": "append",
    }
    head = [_directive(f"--{key}", value) for key, value in options.items() if value is not None]
    head += [_directive(option) for option in ("--requeue", *request.options)]
    command = [sys.executable, "-m", "paceline", "train", *words, "--run-dir", str(folder.path), "--resume", "auto"]
    command += ["--procs", request.procs] if request.procs is not None else []
    rendezvous = f' --nodes {request.nodes} --rendezvous "$head:$port"' if request.nodes > 1 else ""
    return f"""#!/bin/bash
# Written by `paceline submit`: one task per node, which starts the ranks of that node.
{chr(10).join(head)}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=0 --wait=0 bash -c {shlex.quote(TASK)} task \\
    {shlex.join(command)}{rendezvous} &
step=$!

# Slurm sends USR1 before the time limit. The run saves and exits with code 3, and the job is requeued.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
wait "$step" 2>/dev/null; last=$?
[ "$last" = 127 ] || code=$last  # 127: the loop has read its exit code

# Also after a preemption, but not after scancel, which leaves the job in another state.
state=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T)
if [ "$code" = 3 ] && [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.max_requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _directive(option: str, value: object = None) -> str:
    """The line for one option of sbatch: as the user wrote it, or with a value in quotes."""
    text = option if value is None else f'{option}="{value}"'
    if not text.isprintable() or (value is not None and set(str(value)) & {'"', "\\"}):
        raise ConfigError(f"{text!r} cannot be an option of sbatch; remove its line breaks, quotes and backslashes")
    return f"#SBATCH {text}"


def submit(text: str, folder: RunFolder) -> str:
    """Submit a batch script to Slurm; returns the job ID."""
    if (job := job_of(folder)) is not None and (state := state_of(job)).startswith(UNFINISHED):
        raise ConfigError(
            f"{folder.path} already belongs to job {job}, {state}; cancel it first, or choose another run_dir"
        )
    folder.logs.mkdir(parents=True, exist_ok=True)
    write_text(folder.job_script, text)
    job = _slurm("sbatch", "--parsable", str(folder.job_script)).partition(";")[0].strip()
    write_json(folder.slurm, {"job": job})
    return job


def job_of(folder: RunFolder) -> str | None:
    """The ID of a run's Slurm job, if it was submitted."""
    if not folder.slurm.exists():
        return None
    try:
        job = str(json.loads(folder.slurm.read_text(encoding="utf-8"))["job"])
    except (ValueError, KeyError, TypeError):
        job = ""
    if not re.fullmatch("[0-9]+", job):  # it becomes an argument of Slurm commands
        raise ConfigError(f"{folder.slurm} does not contain a Slurm job ID; remove it, and use Slurm's own commands")
    return job


def state_of(job: str) -> str:
    """The state of a job as Slurm reports it, with the reason or the time if there is one."""
    shown = _slurm("scontrol", "--oneliner", "show", "job", job, may_fail=True)
    facts = dict(re.findall(r"(\w+)=(\S*)", shown))
    if "JobState" not in facts:
        ended = _slurm("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State",
                       may_fail=True)  # fmt: skip
        return ended.strip().splitlines()[-1] if ended.strip() else "no longer known to Slurm"
    state, requeued = facts["JobState"], int(facts.get("Restarts") or 0)
    words = [state]
    if state == "PENDING" and facts.get("Reason") not in (None, "None"):
        words.append(f"({facts['Reason']})")
    if state == "RUNNING":
        words.append(f"for {facts.get('RunTime')} of {facts.get('TimeLimit')} on {facts.get('NodeList')}")
    return " ".join(words) + (f", requeued {requeued} times" if requeued else "")


def describe(folder: RunFolder) -> list[str]:
    """The status of a run in lines: its job, its progress, and how it ended."""
    job, lines = job_of(folder), []
    has_ended = False
    if job is not None:
        state = state_of(job)
        lines, has_ended = [f"job {job}: {state}"], not state.startswith(UNFINISHED)
    damaged: list[int] = []
    events = list(read(folder.events, damaged)) if folder.events.exists() else []
    if damaged:
        lines.append(damage_text(damaged))
    if not events:
        return [*lines, *(_end_of_log(folder) if has_ended else ["the run has not started yet"])]
    return [*lines, *_progress(events), _ending(folder, events[-1])]


def _progress(events: Sequence[Event]) -> Iterator[str]:
    last = {event["event"]: complete(event) for event in events}
    started, seconds = last.get("run_started", {}), max(0.0, time.time() - events[-1]["time"])
    yield f"{started.get('name')}: {ranks_text(started.get('world_size', 1))}, last event {seconds:.0f} s ago"
    if (step := last.get("step")) is not None:
        loss = "-" if step["loss"] is None else f"{step['loss']:.4f}"
        yield f"step {step['step']} of {step['steps'] or '?'}, epoch {step['epoch']}, loss {loss}"
    if (epoch := last.get("epoch")) is not None:
        metrics = {name: value for name, value in epoch.items() if isinstance(value, float) and name != "time"}
        yield "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    if restarts := sum(event["event"] == "restarted" for event in events):
        yield f"restarted {restarts} times, last: {last['restarted']['text']}"


def _ending(folder: RunFolder, last: Event) -> str:
    if (outcome := result_text(folder)) is not None:
        return f"finished: {outcome}"
    if is_locked(folder):
        return "running"
    if last["event"] == "run_failed":
        return f"failed: {last['text']}"
    stopped = f", stopped by {complete(last)['reason']}" if last["event"] == "run_stopped" else ""
    return f"not running{stopped}; {resume_hint(folder)}"


def _end_of_log(folder: RunFolder) -> list[str]:
    """The last lines of the output of a job that ended before its run started."""
    try:
        written = folder.job_log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"the run did not start, and {folder.job_log} cannot be read: {error.strerror}"]
    last = [line for line in written if line.strip()][-LAST_LINES:]
    return [f"the run did not start; the end of {folder.job_log}:", *(f"  {line}" for line in last)]


def cancel(job: str) -> None:
    """Cancel a job; its run saves first, if Slurm leaves it enough time."""
    _slurm("scancel", job)


def _slurm(*command: str, may_fail: bool = False) -> str:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; use a host from which Slurm jobs can be submitted")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode and not may_fail:
        raise PacelineError(f"{command[0]}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


def find_log(folder: RunFolder, rank: int | None) -> Path:
    """The log of a rank; without a rank, the output of the job, or else the log of rank 0."""
    path = folder.log(rank) if rank is not None else folder.job_log
    if rank is None and not path.exists():
        path = folder.log(0)
    if not path.exists():
        raise ConfigError(f"{path} does not exist; the run has not started yet, or it does not have this rank")
    return path
