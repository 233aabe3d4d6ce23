"""Checks of a config that start ranks, or that need more than facts about the machine."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, PacelineError, RankFailed, Stopped
from paceline.formatting import size_text
from paceline.run import job
from paceline.tools.doctor import bandwidth, checks, rehearsal
from paceline.tools.doctor.checks import Finding, RehearsalResult, failure_of
from paceline.tools.doctor.facts import MachineFacts
from paceline.tools.doctor.plan import most_ranks, plan_of

OnProgress = Callable[[str], None]
DEFAULT_MAX_RANKS = 2  # of a rehearsal, unless the number of processes was given


def try_config(config: Config, machine: MachineFacts, on_progress: OnProgress, *, has_procs: bool) -> Iterator[Finding]:
    """Whether ranks can be started with a config and train one step; `has_procs` if their number was given."""
    pickling = check_pickling(config)
    yield pickling
    if config.rendezvous is not None:
        yield check_rendezvous(config.rendezvous, machine)
    if pickling.state == "failure":
        return
    most = most_ranks(config)
    ranks = most if has_procs else min(most, DEFAULT_MAX_RANKS)
    on_progress(f"rehearsal: one step on the CPU, processes: {ranks}")
    result, finding = try_step(config, ranks, machine)
    yield finding
    if result is not None and result.checkpoint is not None:
        yield checks.check_checkpoints(result.checkpoint, config, machine)
    yield from try_ranks(config, machine, on_progress, result)


def try_ranks(
    config: Config, machine: MachineFacts, on_progress: OnProgress, result: RehearsalResult | None = None
) -> Iterator[Finding]:
    """Whether the ranks of a run fit into memory here, and the speed of an all-reduce among them."""
    try:
        plan = plan_of(config)
        yield checks.check_ranks(*plan, machine)
        if result is not None and (finding := checks.check_rank_memory(result, plan.ranks, plan.device, machine)):
            yield finding
        if plan.ranks > 1:
            on_progress(f"all-reduce: {plan.ranks} ranks, {plan.backend}")
            with temporary_run_folder(machine) as folder:
                seconds = bandwidth.measure(config, plan.ranks, folder)
            yield checks.check_bandwidth(bandwidth.SIZE, seconds, plan.ranks, plan.backend)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        yield Finding("all-reduce", "failure", str(error), "see the log; set NCCL_DEBUG=INFO for more output of NCCL")
    except PacelineError as error:
        yield failure_of("ranks", str(error))


def check_pickling(config: Config) -> Finding:
    """Whether functions and data can be sent to other processes."""
    try:
        packed = job.pack(config, job.Task("builtins:print"))  # any task suffices: it is sent by name
    except PacelineError as error:
        return failure_of("pickling", str(error))
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        return Finding("pickling", "failure", f"{type(error).__name__}: {error}", "use functions that can be pickled")
    size = len(packed.header) + sum(buffer.raw().nbytes for buffer in packed.buffers)
    return Finding("pickling", "ok", f"{size_text(size)} sent to the ranks")


def check_rendezvous(rendezvous: str, machine: MachineFacts) -> Finding:
    """The interface of this machine on the route to the host of the rendezvous."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((rendezvous.rpartition(":")[0], 9))  # looks up the route; nothing is sent
            own = probe.getsockname()[0]
    except OSError as error:
        text = f"{rendezvous} cannot be reached: {error.strerror}"
        return Finding("rendezvous", "failure", text, "check the host name and the network")
    name = next((each.name for each in machine.interfaces if each.address == own), "an unknown interface")
    return Finding("rendezvous", "ok", f"{rendezvous} is reached over {name}")


def try_step(config: Config, ranks: int, machine: MachineFacts) -> tuple[RehearsalResult | None, Finding]:
    """The result of a rehearsal, None if it failed, and the finding."""
    advice = checks.FIX_IT
    if machine.usable_gpus:
        advice += "; code that needs a GPU cannot be rehearsed; try `paceline train … max_steps=1`"
    try:
        with temporary_run_folder(machine) as folder:
            result = rehearsal.rehearse(config, ranks, folder)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        return None, Finding("rehearsal", "failure", str(error), advice)
    except PacelineError as error:
        return None, failure_of("rehearsal", str(error))
    return result, checks.check_rehearsal(result)


@contextmanager
def temporary_run_folder(machine: MachineFacts) -> Iterator[Path]:
    """A run folder on the disk of the runs; it is kept only if a rank has failed, for its log."""
    try:
        created = tempfile.mkdtemp(prefix=".paceline-doctor-", dir=machine.folder if machine.is_writable else None)
    except OSError as error:
        text = f"{error.filename} cannot be created: {error.strerror}; choose another --run-dir"
        raise ConfigError(text) from None
    try:
        yield Path(created)
    except RankFailed:
        raise
    except BaseException as error:
        shutil.rmtree(created, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            error.args = ()  # the arguments name the temporary folder
        raise
    shutil.rmtree(created, ignore_errors=True)
