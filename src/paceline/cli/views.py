"""`paceline board` and `report`: runs as curves, in TensorBoard and on an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import find_run, newest_run
from paceline.errors import ConfigError
from paceline.formatting import printable


def board(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders of them; by default runs.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port; by default the first free one from 6006; 0 for any."),
    ] = None,
) -> None:
    """Open TensorBoard on runs.

    Only this machine can connect to it. Example: paceline board runs/mnist runs/tabular
    """
    from paceline.tools.board import serve

    serve(runs or [Path("runs")], port, log=typer.echo)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders; several are compared; by default the newest in runs."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML report of one or more runs.

    The page is one file that needs no network. Example: paceline report runs/NAME/DATE-TIME --out report.html
    """
    from paceline.run.atomic_files import write_text
    from paceline.tools.report.facts import facts_of_all
    from paceline.tools.report.page import page_of

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give a file, such as {out / 'report.html'}")
    page = page_of(facts_of_all(_runs_among(runs or [newest_run()])))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; choose another file") from None
    typer.echo(f"{out}: {len(page) / 1e6:.1f} MB; open it in a browser, no network is needed")


def _runs_among(paths: list[Path]) -> list[Path]:
    """The folders that hold runs. Others, which `runs/NAME/*` may match too, are listed in one line and left out."""
    from paceline.run.layout import RunFolder

    others = [path for path in paths if path.exists() and not RunFolder(path).holds_run()]
    if len(others) == len(paths):
        find_run(paths[0])  # raises
    if others:
        typer.echo(printable(f"left out, no run folder: {', '.join(map(str, others))}"), err=True)
    return [find_run(path).path for path in paths if path not in others]
