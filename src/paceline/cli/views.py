"""`paceline board` and `report`: what runs look like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import find_run, newest_run
from paceline.errors import ConfigError


def board(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders of them; runs by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The first free one from 6006 on by default; 0: any.")
    ] = None,
) -> None:
    """Open TensorBoard on runs, for this machine alone: paceline board runs/mnist runs/tabular"""
    from paceline.telemetry.server import serve

    serve(runs or [Path("runs")], port, say=typer.echo)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders; several are compared; the newest below runs by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs, to read anywhere: paceline report runs/NAME/DATE-TIME --out report.html"""
    from paceline.report.page import page_of
    from paceline.report.read import facts_of_all
    from paceline.run_folder import write_text

    page = page_of(facts_of_all([find_run(run).path for run in runs or [newest_run()]]))
    try:
        write_text(out, page)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; choose another file") from None
    typer.echo(f"{out}: {len(page) / 1e6:.1f} MB; open it in a browser, no network is needed")
