"""The examination from beginning to end: the machine, the config, then what only ranks can show."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline import config as configs
from paceline import launch
from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, PacelineError, RankFailed, Stopped

if TYPE_CHECKING:
    from paceline.tools.doctor.checks import Finding, Trial
    from paceline.tools.doctor.facts import Machine

Say = Callable[[str], None]
MOST_RANKS = 2  # of a rehearsal whose number of processes nobody has asked for


class Plan(NamedTuple):
    """The ranks that a run would have on this machine."""

    ranks: int
    device: str
    backend: str


def examine(path: Path | None, overrides: Sequence[str], procs: str | None, say: Say) -> Iterator[Finding]:
    """Findings as they are made. Without a config at `path` only the machine is looked at, and `procs` ranks if given.

    `say` is told what takes time.
    """
    raw, problems = _read(path, overrides, procs)
    folder = path.parent.resolve() if path is not None else Path()
    if not problems and (path is not None or procs is not None):
        # The ranks can import torch while this process does.
        launch.prepare({"launcher": "local", "ddp": raw.get("ddp", True), "procs": raw.get("procs")}, folder)
    from paceline.tools.doctor import checks, facts

    machine = facts.gather(Path(str(raw.get("run_dir") or "runs")))
    yield from checks.of_machine(machine)
    config, problems = (None, problems) if problems else _build(raw, folder, has_functions=path is not None)
    yield from (checks.failure_of("config", problem) for problem in problems)
    if config is not None and path is not None:
        yield checks.Finding("config", "ok", f"{path} is right, its functions are there")
        yield from _of_config(config, is_asked=procs is not None, machine=machine, say=say)
    elif config is not None and procs is not None:
        yield from _of_ranks(config, machine, say)


def plan_of(config: Config) -> Plan:
    """The ranks that a run would have here, or ConfigError where it could not begin."""
    from paceline.data.batches import lanes_of
    from paceline.launch.machines import LocalMachine
    from paceline.world import pick_backend, pick_device

    ranks = LocalMachine(config).ranks_for(config.lanes)
    device = pick_device(config.device, 0)
    backend = pick_backend(config.backend, device, ranks)
    lanes_of(0, ranks, config.lanes or ranks)
    return Plan(ranks, device.type, backend)


def _read(path: Path | None, overrides: Sequence[str], procs: str | None) -> tuple[dict[str, Any], list[str]]:
    """What a config file and the command line say, and what is wrong with it; without torch."""
    raw: dict[str, Any] = {}
    try:
        raw = configs.read_yaml(path) if path is not None else {}
        configs.override(raw, overrides)
    except ConfigError as error:
        return raw, error.problems
    return (raw if procs is None else {**raw, "procs": procs}), []


def _build(raw: dict[str, Any], folder: Path, *, has_functions: bool) -> tuple[Config | None, list[str]]:
    """The config, and what is wrong with it."""
    from paceline.observe.sinks import trackers
    from paceline.trainer import build_config

    try:
        config = build_config(raw, folder) if has_functions else Config(**raw)
        trackers.check(config.log.trackers)
        return config, []
    except ConfigError as error:
        return None, error.problems
    except ValidationError as error:
        return None, configs.problems_of(error)


def _of_config(config: Config, *, is_asked: bool, machine: Machine, say: Say) -> Iterator[Finding]:
    """Whether the config's functions travel and do a step; `is_asked` if the number of processes was given."""
    from paceline.launch.machines import capacity
    from paceline.tools.doctor import checks

    travel = _travel(config)
    yield travel
    if config.rendezvous is not None:
        yield _way_to(config.rendezvous)
    if travel.state == "failure":
        return
    most = capacity(config)[1]
    tried = most if is_asked else min(most, MOST_RANKS)
    say(f"rehearsal: one step on the CPU, processes: {tried}")
    trial, finding = _rehearsal(config, tried, machine)
    yield finding
    if trial is not None and trial.checkpoint is not None:
        yield checks.check_checkpoints(trial.checkpoint, config, machine)
    yield from _of_ranks(config, machine, say, trial)


def _of_ranks(config: Config, machine: Machine, say: Say, trial: Trial | None = None) -> Iterator[Finding]:
    """Whether the ranks that a run would have here have room, and how fast they talk to each other."""
    from paceline.tools.doctor import bandwidth, checks

    try:
        plan = plan_of(config)
        yield checks.check_ranks(*plan, machine)
        if trial is not None and (capacity := checks.check_rank_memory(trial, plan.ranks, plan.device, machine)):
            yield capacity
        if plan.ranks > 1:
            say(f"all-reduce: {plan.ranks} ranks, {plan.backend}")
            with _trial_folder(machine) as folder:
                seconds = bandwidth.measure(config, plan.ranks, folder)
            yield checks.check_bandwidth(bandwidth.SIZE, seconds, plan.ranks, plan.backend)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        yield checks.Finding("all-reduce", "failure", str(error), "see the log; NCCL_DEBUG=INFO makes NCCL tell more")
    except PacelineError as error:
        yield checks.failure_of("ranks", str(error))


def _travel(config: Config) -> Finding:
    """Whether functions and data can be sent to other processes."""
    from paceline.formatting import size_text
    from paceline.run import job
    from paceline.tools.doctor.checks import Finding, failure_of
    from paceline.worker.main import train

    try:
        packed = job.pack(config, train)
    except PacelineError as error:
        return failure_of("travel", str(error))
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        return Finding("travel", "failure", f"{type(error).__name__}: {error}", "give functions that pickle")
    size = len(packed.header) + sum(buffer.raw().nbytes for buffer in packed.buffers)
    return Finding("travel", "ok", f"{size_text(size)} go to the ranks")


def _way_to(rendezvous: str) -> Finding:
    """Which interface leads to the host where all meet."""
    from paceline.launch.cluster.coordinator import address_in
    from paceline.launch.network import interface_towards
    from paceline.tools.doctor.checks import Finding, failure_of

    try:
        name = interface_towards(address_in(rendezvous)[0])
    except ConfigError as error:
        return failure_of("rendezvous", str(error))
    except OSError as error:
        return Finding("rendezvous", "failure", f"no way to {rendezvous}: {error.strerror}", "check the network")
    return Finding("rendezvous", "ok", f"{rendezvous} is reached over {name or 'an unknown interface'}")


def _rehearsal(config: Config, ranks: int, machine: Machine) -> tuple[Trial | None, Finding]:
    """What one step has shown, or why there was none."""
    from paceline.tools.doctor import checks, rehearsal

    advice = checks.MEND
    if machine.usable_gpus:
        advice += "; what needs a GPU cannot be rehearsed, try `paceline train … max_steps=1`"
    try:
        with _trial_folder(machine) as folder:
            trial = rehearsal.try_step(config, ranks, folder)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        return None, checks.Finding("rehearsal", "failure", str(error), advice)
    except PacelineError as error:
        return None, checks.failure_of("rehearsal", str(error))
    return trial, checks.check_trial(trial)


@contextmanager
def _trial_folder(machine: Machine) -> Iterator[Path]:
    """A run folder on the disk of the runs; it stays only if a rank has failed, for its log."""
    try:
        made = tempfile.mkdtemp(prefix=".paceline-doctor-", dir=machine.folder if machine.is_writable else None)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be made: {error.strerror}; choose another --run-dir") from None
    try:
        yield Path(made)
    except RankFailed:
        raise
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            error.args = ()  # they name the folder
        raise
    shutil.rmtree(made, ignore_errors=True)
