"""Plans a run: measures a config here, computes forecasts, and keeps them where `paceline report` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Config, dotted_items
from paceline.errors import ConfigError
from paceline.run.atomic_files import write_json
from paceline.tools.plan.advice import advice_on
from paceline.tools.plan.facts import Measured, RunKeys
from paceline.tools.plan.fit import largest_batch_here
from paceline.tools.plan.forecast import Forecast, Terms, forecast, possible_ranks
from paceline.tools.plan.measure import measure
from paceline.tools.report.planned import PLAN

DEFAULT_RANKS = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class Plan:
    """The forecasts of a config, what they were computed from, and what to change."""

    name: str
    link: str
    terms: Terms
    measured: Measured
    keys: RunKeys
    rows: list[Forecast]
    advice: list[str]
    largest_batch: int | None  # that fits the GPU; None on a CPU, where it is not tried
    settings: dict[str, Any]  # the config with keys such as `optimizer.lr`

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return asdict(self)


def make_plan(config: Config, ranks: Sequence[int] | None, link: str, terms: Terms, steps: int, folder: Path) -> Plan:
    """Measure a config on this machine and plan it for these numbers of ranks. `folder` may contain a `.env` file."""
    check_ranks(config, ranks)
    parent = place_of(config)
    here = local_ranks(config, terms.per_host)
    measured, keys = measure(config, here, steps, parent / "plan", folder)
    rows = [forecast(measured, keys, terms, each) for each in possible_ranks(ranks or DEFAULT_RANKS, keys)]
    largest = None
    if measured.device != "cpu" and keys.samples is not None:
        largest = largest_batch_here(config, here, keys.samples, parent / "plan", folder)
    plan = Plan(
        config.name, link, terms, measured, keys, rows, advice_on(measured, keys, terms, rows), largest,
        dict(dotted_items(yaml.safe_load(config.to_yaml()))),
    )  # fmt: skip
    write_json(parent / PLAN, plan.as_dict())
    return plan


def check_ranks(config: Config, ranks: Sequence[int] | None) -> None:
    """Reject numbers of ranks for which there are no lanes."""
    most = max(ranks or [1])
    if config.lanes is not None and most > config.lanes:
        raise ConfigError(
            f"--ranks {most} but lanes={config.lanes}: each rank needs a lane; use at most --ranks {config.lanes}, or "
            f"lanes={most}"
        )


def place_of(config: Config) -> Path:
    """The folder in which the run folders of this config are."""
    return config.run_dir.parent if config.run_dir is not None else Path("runs") / config.name


def local_ranks(config: Config, per_host: int) -> int:
    """The ranks to measure at the same time: those of a host, as far as this machine has GPUs or cores for them."""
    import torch

    from paceline.system.cores import usable_cores
    from paceline.world import pick_device

    is_gpu = pick_device(config.device, 0).type == "cuda"
    return max(1, min(per_host, torch.cuda.device_count() if is_gpu else usable_cores()))
