"""All checks in order: the machine, the config, then what is measured by starting ranks."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline import config as configs
from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, PacelineError, RankFailed, Stopped

if TYPE_CHECKING:
    from paceline.tools.doctor.checks import Finding, RehearsalResult
    from paceline.tools.doctor.facts import MachineFacts

OnProgress = Callable[[str], None]
DEFAULT_MAX_RANKS = 2  # of a rehearsal, unless the number of processes was given


def examine(
    path: Path | None,
    overrides: Sequence[str],
    procs: str | None,
    on_progress: OnProgress = lambda text: None,
    prepare: Callable[[Mapping[str, Any], Path], None] = lambda raw, folder: None,
) -> Iterator[Finding]:
    """Yield findings as they are made. Without a config at `path`: of the machine, and of `procs` ranks if given.

    `on_progress` is called before what takes time; `prepare` with the config's keys and folder, before torch is
    imported here, if ranks will be started.
    """
    raw, problems = _read(path, overrides, procs)
    folder = path.parent.resolve() if path is not None else Path()
    if not problems and (path is not None or procs is not None):
        prepare({"launcher": "local", "ddp": raw.get("ddp", True), "procs": raw.get("procs")}, folder)
    from paceline.tools.doctor import checks, facts

    machine = facts.gather(Path(str(raw.get("run_dir") or "runs")))
    yield from checks.check_machine(machine)
    config, problems = (None, problems) if problems else _build(raw, folder, has_functions=path is not None)
    yield from (checks.failure_of("config", problem) for problem in problems)
    if config is not None and path is not None:
        yield checks.Finding("config", "ok", f"{path} is valid, its functions were found")
        yield from _examine_config(config, machine, on_progress, has_procs=procs is not None)
    elif config is not None and procs is not None:
        yield from _examine_ranks(config, machine, on_progress)


def _read(path: Path | None, overrides: Sequence[str], procs: str | None) -> tuple[dict[str, Any], list[str]]:
    """The keys of a config file and of the command line, and the problems with them; does not import torch."""
    raw: dict[str, Any] = {}
    try:
        raw = configs.read_yaml(path) if path is not None else {}
        configs.override(raw, overrides)
    except ConfigError as error:
        return raw, error.problems
    return (raw if procs is None else {**raw, "procs": procs}), []


def _build(raw: dict[str, Any], folder: Path, *, has_functions: bool) -> tuple[Config | None, list[str]]:
    """The config, and the problems with it."""
    from paceline.observe.sinks import registry
    from paceline.trainer import build_config

    try:
        config = build_config(raw, folder) if has_functions else Config(**raw)
        registry.check(config.log.trackers)
        return config, []
    except ConfigError as error:
        return None, error.problems
    except ValidationError as error:
        return None, configs.problems_of(error)


def _examine_config(
    config: Config, machine: MachineFacts, on_progress: OnProgress, *, has_procs: bool
) -> Iterator[Finding]:
    """Whether ranks can be started with a config and train one step; `has_procs` if their number was given."""
    from paceline.tools.doctor import checks
    from paceline.tools.doctor.plan import most_ranks

    travel = _check_travel(config)
    yield travel
    if config.rendezvous is not None:
        yield _check_rendezvous(config.rendezvous, machine)
    if travel.state == "failure":
        return
    most = most_ranks(config)
    ranks = most if has_procs else min(most, DEFAULT_MAX_RANKS)
    on_progress(f"rehearsal: one step on the CPU, processes: {ranks}")
    result, finding = _rehearse(config, ranks, machine)
    yield finding
    if result is not None and result.checkpoint is not None:
        yield checks.check_checkpoints(result.checkpoint, config, machine)
    yield from _examine_ranks(config, machine, on_progress, result)


def _examine_ranks(
    config: Config, machine: MachineFacts, on_progress: OnProgress, result: RehearsalResult | None = None
) -> Iterator[Finding]:
    """Whether the ranks that a run would have here fit into memory, and how fast an all-reduce among them is."""
    from paceline.tools.doctor import bandwidth, checks
    from paceline.tools.doctor.plan import plan_of

    try:
        plan = plan_of(config)
        yield checks.check_ranks(*plan, machine)
        if result is not None and (finding := checks.check_rank_memory(result, plan.ranks, plan.device, machine)):
            yield finding
        if plan.ranks > 1:
            on_progress(f"all-reduce: {plan.ranks} ranks, {plan.backend}")
            with _temporary_run_folder(machine) as folder:
                seconds = bandwidth.measure(config, plan.ranks, folder)
            yield checks.check_bandwidth(bandwidth.SIZE, seconds, plan.ranks, plan.backend)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        yield checks.Finding("all-reduce", "failure", str(error), "see the log; NCCL_DEBUG=INFO makes NCCL log more")
    except PacelineError as error:
        yield checks.failure_of("ranks", str(error))


def _check_travel(config: Config) -> Finding:
    """Whether functions and data can be sent to other processes."""
    from paceline.formatting import size_text
    from paceline.run import job
    from paceline.tools.doctor.checks import Finding, failure_of

    try:
        packed = job.pack(config, print)  # any task will do: it is sent by name
    except PacelineError as error:
        return failure_of("travel", str(error))
    except Exception as error:  # noqa: BLE001 - any object may raise anything from __reduce__
        return Finding("travel", "failure", f"{type(error).__name__}: {error}", "use functions that can be pickled")
    size = len(packed.header) + sum(buffer.raw().nbytes for buffer in packed.buffers)
    return Finding("travel", "ok", f"{size_text(size)} are sent to the ranks")


def _check_rendezvous(rendezvous: str, machine: MachineFacts) -> Finding:
    """Which interface of this machine leads to the host of the rendezvous."""
    from paceline.tools.doctor.checks import Finding

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((rendezvous.rpartition(":")[0], 9))  # looks up the route; nothing is sent
            own = probe.getsockname()[0]
    except OSError as error:
        text = f"{rendezvous} cannot be reached: {error.strerror}"
        return Finding("rendezvous", "failure", text, "check the name of the host, and the network")
    name = next((each.name for each in machine.interfaces if each.address == own), "an unknown interface")
    return Finding("rendezvous", "ok", f"{rendezvous} is reached over {name}")


def _rehearse(config: Config, ranks: int, machine: MachineFacts) -> tuple[RehearsalResult | None, Finding]:
    """The result of a rehearsal, None if it failed, and the finding."""
    from paceline.tools.doctor import checks, rehearsal

    advice = checks.FIX_IT
    if machine.usable_gpus:
        advice += "; code that needs a GPU cannot be rehearsed, try `paceline train … max_steps=1`"
    try:
        with _temporary_run_folder(machine) as folder:
            result = rehearsal.rehearse(config, ranks, folder)
    except (Interrupted, Stopped):
        raise
    except RankFailed as error:
        return None, checks.Finding("rehearsal", "failure", str(error), advice)
    except PacelineError as error:
        return None, checks.failure_of("rehearsal", str(error))
    return result, checks.check_rehearsal(result)


@contextmanager
def _temporary_run_folder(machine: MachineFacts) -> Iterator[Path]:
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
            error.args = ()  # they name the folder
        raise
    shutil.rmtree(created, ignore_errors=True)
