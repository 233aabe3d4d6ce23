"""`paceline plan`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline.cli.arguments import Overrides, Target, build_config, parse_numbers
from paceline.cli.output import is_main, show_table
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.tools.plan.plan import Plan


def plan(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, such as 1,8,64; by default powers of two up to 1024.")
    ] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, help="The number of processes per host; by default one per GPU, or 1.")
    ] = None,
    link: Annotated[
        str,
        typer.Option(help="The link between hosts: nvlink, pcie, ib400, 100gbe, 10gbe, or SPEED,LATENCY."),
    ] = "10gbe",
    price: Annotated[float | None, typer.Option(min=0, help="The price of a rank for an hour.")] = None,
    deadline: Annotated[str | None, typer.Option(help="The time the run may take, such as 12h or 90m.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps to measure here.")] = 20,
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("plan.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print only a JSON object.")] = False,
) -> None:
    """Show the time and the price of a run on more ranks.

    Measures a few steps here, and says what to change.
    Example: paceline plan config.yaml --ranks 1,8,64 --link 100gbe --price 2.5
    """
    from paceline.tools.plan.links import parse_duration, parse_link

    wanted = sorted(set(parse_numbers("ranks", ranks))) if ranks is not None else None
    between, deadline_s = parse_link(link), parse_duration(deadline) if deadline is not None else None
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give a file, such as {out / 'plan.html'}")
    built, folder = build_config(target, overrides)
    from paceline.launch.machines import capacity
    from paceline.tools.plan.forecast import Terms
    from paceline.tools.plan.plan import make_plan

    terms = Terms(between, procs or capacity(built)[1], price, deadline_s)
    with redirect_stdout(sys.stderr):  # the user's functions may print
        made = make_plan(built, wanted, link, terms, steps, folder)
    if not is_main():
        return
    _write_page(made, out)
    if as_json:
        typer.echo(json.dumps(made.as_dict()))
        return
    show(made)
    typer.echo(f"\n{out}: open it in a browser; paceline report will compare the run with this plan")


def _write_page(made: Plan, out: Path) -> None:
    from paceline.run.atomic_files import write_text
    from paceline.tools.plan.page import page_of

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page_of(made))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; choose another file") from None


def show(made: Plan) -> None:
    """Print the table of the forecasts, and the advice."""
    from paceline.tools.plan.page import head_of, row_of

    typer.echo(f"{made.name}: {made.measured.concurrent} × {made.measured.device} measured, link {made.link}\n")
    table = Table(*head_of(made), box=None)
    for row in made.rows:
        table.add_row(*row_of(made, row))
    show_table(table)
    typer.echo()
    for sentence in made.advice:
        typer.echo(f"→ {sentence}")
    if made.largest_batch is not None:
        typer.echo(f"→ batch_size={made.largest_batch} is the largest that fits this GPU")
