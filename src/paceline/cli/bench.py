"""`paceline bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli.arguments import parse_numbers
from paceline.cli.output import show_table


def bench(
    models: Annotated[str, typer.Option(help="The models to train: mnist, cifar.")] = "mnist,cifar",
    procs: Annotated[int, typer.Option(help="The number of processes.")] = 1,
    scaling: Annotated[
        str,
        typer.Option(help="Also measure the hand-written loop and Paceline with 1,2,4 or other numbers of processes."),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Steps to measure; the default depends on the model.")] = None,
    rounds: Annotated[int, typer.Option(help="The number of measurements of each loop; medians are shown.")] = 3,
    workers: Annotated[int, typer.Option(help="DataLoader workers per process.")] = 0,
    only: Annotated[str, typer.Option(help="The loops, such as hand-written,paceline; by default all.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
) -> None:
    """Compare the speed of Paceline with other training loops.

    Times small models in a hand-written DDP loop, in Paceline, and in other libraries that are installed.
    """
    from paceline.run.atomic_files import write_json
    from paceline.tools.bench.bench import BenchPlan
    from paceline.tools.bench.bench import bench as run_bench

    plan = BenchPlan(
        models=_names(models), contenders=_names(only), procs=procs,
        scaling=parse_numbers("scaling", scaling) if scaling else (), steps=steps, rounds=rounds, workers=workers,
        device=device,
    )  # fmt: skip
    report = run_bench(plan, log=lambda text: typer.echo(text, err=True))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, report)
    show_report(report)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def show_report(report: dict[str, Any]) -> None:
    """Print the figures of a benchmark as tables."""
    where = report["machine"]
    on = where["gpu"] or f"{where['cores']} cores"
    typer.echo(f"{on}, torch {where['torch']}, Python {where['python']}; medians, rounds: {report['rounds']}")
    for model in report["models"]:
        typer.echo(f"\n{model['model']}: {model['title']}, processes: {model['procs']}")
        table = Table("loop", "version", "DDP", "µs/step", "ratio", "lowest to highest, µs", box=None)
        for row in model["rows"]:
            table.add_row(row["title"], f"{row['package']} {row['version']}", *_figures(row))
        show_table(table)
        if model["scaling"]:
            typer.echo()
            table = Table("loop", "processes", "samples/s", "speed-up", "efficiency", box=None)
            for row in model["scaling"]:
                table.add_row(row["title"], str(row["procs"]), *_scaled_figures(row))
            show_table(table)


def _figures(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return ["", escape(row["error"])]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    # On a busy machine, rounds differ more than loops do.
    spread = f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"
    return ["yes" if row["has_ddp"] else "no", f"{row['us_per_step']:,.0f}", ratio, spread]


def _scaled_figures(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [escape(row["error"])]
    return [f"{row['samples_per_s']:,.0f}", f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"]
