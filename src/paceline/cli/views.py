"""`paceline board` and `report`: the curves of runs in TensorBoard and on an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import find_run, folder_of, newest_run
from paceline.errors import ConfigError
from paceline.formatting import printable


def board(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders with runs in them; by default runs."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port; by default the first free port from 6006; 0 for any free port."),
    ] = None,
) -> None:
    """Show runs in TensorBoard.

    The server accepts connections from this machine only. Example: paceline board runs/mnist runs/tabular
    """
    from paceline.tools.board import serve

    serve(runs or [Path("runs")], port, log=typer.echo)


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run folders or URLs of mirrors; several are compared; by default the newest one in runs.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML report of one or more runs.

    The page is one file and works offline. Example: paceline report runs/NAME/DATE-TIME --out report.html
    """
    from paceline.run.atomic_files import write_text
    from paceline.tools.report.facts import facts_of_all
    from paceline.tools.report.page import page_of

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give a file, such as {out / 'report.html'}")
    page = page_of(facts_of_all(_runs_among([folder_of(run) for run in runs] if runs else [newest_run()])))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; choose another file") from None
    typer.echo(f"{out}: {len(page) / 1e6:.1f} MB; open it in a browser (works offline)")


def _runs_among(paths: list[Path]) -> list[Path]:
    """The folders that contain runs. Prints in one line the others that it skips, which `runs/NAME/*` may match too."""
    from paceline.run.layout import RunFolder

    others = [path for path in paths if path.exists() and not RunFolder(path).holds_run()]
    if len(others) == len(paths):
        find_run(paths[0])  # raises
    if others:
        typer.echo(printable(f"skipped, not a run folder: {', '.join(map(str, others))}"), err=True)
    return [find_run(path).path for path in paths if path not in others]
