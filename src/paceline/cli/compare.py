"""`paceline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli.arguments import Overrides, Target, build_config, parse_numbers
from paceline.cli.output import show_table


def compare(
    target: Target,
    overrides: Overrides = None,
    procs: Annotated[str, typer.Option(help="Numbers of processes, such as 1,2,4.")] = "1,2",
    run_dir: Annotated[Path | None, typer.Option(help="The folder for all runs of the comparison.")] = None,
) -> None:
    """Compare plain training with DDP: time, loss and weights.

    Example: paceline compare config.yaml --procs 1,2,4
    """
    numbers = parse_numbers("procs", procs)
    built, home = build_config(target, overrides, run_dir=run_dir)
    from paceline.tools.compare import compare as run_comparison

    comparison = run_comparison(built, numbers, home, log=lambda text: typer.echo(text, err=True))
    names = list(comparison.rows[0].metrics)
    table = Table("run", "seconds", "samples/s", "speed-up", "efficiency", "loss", *names, "weights", box=None)
    for row in comparison.rows:
        loss = "" if row.train_loss is None else f"{row.train_loss:.6f}"
        speed = (f"{row.seconds:.2f}", f"{row.samples_per_s:,.0f}", f"{row.speed_up:.2f}", f"{row.efficiency:.0%}")
        measured = (f"{row.metrics[name]:.4f}" for name in names)
        table.add_row(row.name, *speed, loss, *measured, row.weights_sha256[:12])
    show_table(table)
    typer.echo(comparison.verdict)
    typer.echo(f"see {comparison.folder}/compare.html and compare.json")
