"""What was planned for a run by `paceline plan`, and what it was: read from the plan beside the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.formatting import duration

PLAN = "plan.json"  # beside the run folders of a config
# Keys on which the plan of a step does not depend.
OTHER_KEYS = (
    "run_dir", "procs", "nodes", "rendezvous", "launcher", "resume", "lanes", "threads", "num_epochs", "max_steps",
    "log.", "checkpoint.", "evaluate.", "callbacks", "seed", "max_restarts", "hang_timeout_s", "time_limit", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """Rows of a name, the planned and the actual text; and a remark about the plan, or ""."""

    rows: list[tuple[str, str, str]]
    remark: str


def planned_of(
    run_dir: Path,
    settings: Mapping[str, Any],
    ranks: int,
    lanes: int,
    samples_per_s: float | None,
    seconds: float | None,
) -> Planned | None:
    """The comparison with the plan beside a run folder, for its number of ranks; None without a plan of that config.

    `seconds` are those of a run that has finished.
    """
    plan = _read(run_dir.parent / PLAN)
    if plan is None or samples_per_s is None or plan.get("name") != settings.get("name"):
        return None
    row = next((row for row in plan["rows"] if row["ranks"] == ranks and row["lanes"] == lanes), None)
    if row is None:
        return Planned([], f"the plan has no row for {ranks} ranks with lanes={lanes}: paceline plan --ranks {ranks}")
    alone = next((row["samples_per_s"] for row in plan["rows"] if row["ranks"] == 1), None)
    step_ms = 1e3 * lanes * plan["keys"]["batch_size"] / samples_per_s
    rows = [
        ("step", f"{row['step_ms']:,.4g} ms", f"{step_ms:,.4g} ms"),
        ("samples per second", f"{row['samples_per_s']:,.0f}", f"{samples_per_s:,.0f}"),
    ]
    if alone:
        rows.append(("efficiency", f"{row['efficiency']:.0%}", f"{samples_per_s / ranks / alone:.0%}"))
    if row["seconds"] is not None:
        rows.append(("time to the end", duration(row["seconds"]), duration(seconds) if seconds else "–"))
    return Planned(rows, _remark(_differing(plan["settings"], settings)))


def _remark(keys: Sequence[str]) -> str:
    return f"the plan was made with other values of {', '.join(keys)}" if keys else ""


def _differing(planned: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """The keys with other values, on which a step depends."""
    keys = dict.fromkeys((*planned, *actual))
    return [key for key in keys if not key.startswith(OTHER_KEYS) and str(planned.get(key)) != str(actual.get(key))]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"rows", "keys", "settings"} <= content.keys() else None
