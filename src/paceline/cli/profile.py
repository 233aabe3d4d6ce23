"""`paceline profile`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli.arguments import Overrides, Target, build_config
from paceline.cli.output import is_main, show_table
from paceline.formatting import ranks_text

if TYPE_CHECKING:
    from paceline.tools.profile.facts import Profile

Measure = Callable[[Iterable[float]], float]
NAME_WIDTH = 60  # names of kernels can be hundreds of characters long


def profile(
    target: Target,
    overrides: Overrides = None,
    procs: Annotated[
        str | None,
        typer.Option(help="The number of processes, or a range such as 1:4; by default one per GPU, or 1."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps to time; as many steps are then traced.")] = 10,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run folder; by default runs/NAME/profile/DATE-TIME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a JSON object.")] = False,
) -> None:
    """Show where a step spends its time and what to change.

    Also writes traces for Perfetto. Example: paceline profile config.yaml --procs 4 --steps 10
    """
    built, folder = build_config(target, overrides, procs=procs, run_dir=run_dir)
    from paceline.tools.profile.profile import profile as run_profile
    from paceline.tools.profile.profile import report_of

    with redirect_stdout(sys.stderr):  # the user's functions may print
        found = run_profile(built, steps, folder)
    if not is_main():
        return
    report = report_of(found)
    if as_json:
        typer.echo(json.dumps(report))
        return
    show(found, report["advice"])


def show(found: Profile, advice: list[str]) -> None:
    """Print the phases of a step, the operators with the longest total time, and the advice."""
    steps = f"steps: {found.steps}, {fmean(found.step_ms):,.2f} ms each"
    typer.echo(f"{ranks_text(found.ranks)} on {found.device}, {steps}\n")
    show_table(_phases(found))
    if found.device == "cuda":
        typer.echo(f" (the CPU waits {fmean(found.data_ms):,.2f} ms per step for data)")
    typer.echo()
    show_table(_operators(found))
    typer.echo()
    for sentence in advice:
        typer.echo(f"→ {sentence}")
    typer.echo(f"\ntraces for Perfetto: {Path(found.traces[0]).with_name('rank-*.json.gz')}")


def _phases(found: Profile) -> Table:
    measures: dict[str, Measure] = {"mean, ms": fmean, "least, ms": min, "most, ms": max}
    if found.ranks == 1:
        measures = {"ms": fmean}
    table = Table("phase", *measures, "share", box=None)
    for name, ms in found.phase_ms.items():
        table.add_row(name, *(f"{measure(ms):,.2f}" for measure in measures.values()), f"{found.share(name):.1%}")
    return table


def _operators(found: Profile) -> Table:
    table = Table("kernel" if found.device == "cuda" else "operator", "ms/step", "calls/step", "share", box=None)
    for row in found.operators:
        name = row.name if len(row.name) <= NAME_WIDTH else f"{row.name[: NAME_WIDTH - 1]}…"
        table.add_row(escape(name), f"{row.ms:,.3f}", f"{row.calls:,.1f}", f"{row.share:.1%}")
    return table
