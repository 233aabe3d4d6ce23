"""All checks in order: the machine, the config file, then the checks that start ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline import config as configs
from paceline.config import Config
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.tools.doctor.checks import Finding


def examine(
    path: Path | None,
    overrides: Sequence[str],
    procs: str | None,
    on_progress: Callable[[str], None] = lambda text: None,
    prepare: Callable[[Mapping[str, Any], Path], None] = lambda raw, folder: None,
) -> Iterator[Finding]:
    """Yield findings one by one. Without a config at `path`: of the machine, and of `procs` ranks if given.

    `on_progress` is called with the name of each part that takes time. If ranks will be started, `prepare` is called
    with the config's keys and folder before torch is imported here.
    """
    raw, overridden, problems = _read(path, overrides, procs)
    folder = path.parent.resolve() if path is not None else Path()
    if not problems and (path is not None or procs is not None):
        prepare({"launcher": "local", "ddp": raw.get("ddp", True), "procs": raw.get("procs")}, folder)
    from paceline.tools.doctor import checks, facts

    machine = facts.gather(Path(str(raw.get("run_dir") or "runs")))
    yield from checks.check_machine(machine)
    config, problems = (None, problems) if problems else _build(raw, folder, overridden, has_functions=path is not None)
    yield from (checks.failure_of("config", problem) for problem in problems)
    if config is None or (path is None and procs is None):
        return
    from paceline.tools.doctor import trials  # after the finding about torch, which may be too old for this import

    if path is None:
        yield from trials.try_ranks(config, machine, on_progress)
    else:
        yield checks.Finding("config", "ok", f"{path} is valid, and its functions were found")
        yield from trials.try_config(config, machine, on_progress, has_procs=procs is not None)


def _read(
    path: Path | None, overrides: Sequence[str], procs: str | None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The settings of a config file and of the command line, the keys of the latter, and problems; without torch."""
    raw: dict[str, Any] = {}
    try:
        raw = configs.read_yaml(path) if path is not None else {}
        overridden = configs.override(raw, overrides)
    except ConfigError as error:
        return raw, [], error.problems
    return (raw if procs is None else {**raw, "procs": procs}), overridden, []


def _build(
    raw: dict[str, Any], folder: Path, overridden: Sequence[str], *, has_functions: bool
) -> tuple[Config | None, list[str]]:
    """The config, and the problems with it."""
    from paceline.observe.sinks import registry
    from paceline.trainer import build_config

    try:
        config = build_config(raw, folder, overridden) if has_functions else Config(**raw)
        registry.check(config.log.trackers)
        return config, []
    except ConfigError as error:
        return None, error.problems
    except ValidationError as error:
        return None, configs.problems_of(error, raw)
