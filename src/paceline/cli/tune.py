"""`paceline tune`."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.arguments import Target, find_config
from paceline.cli.output import show_table
from paceline.errors import MissingExtra

if TYPE_CHECKING:
    from paceline.tools.tune.tune import TuneResult

TRIALS_SHOWN = 20


def tune(
    target: Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to search, such as optimizer.lr=log:1e-4:1e-1 or batch_size={32,64}, and keys to set.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="The total number of trials in the study.")] = 20,
    parallel: Annotated[int, typer.Option(help="The number of parallel trials; they share the GPUs or cores.")] = 1,
    procs: Annotated[str | None, typer.Option(help="The number of processes per trial.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric to optimize, such as accuracy; by default the metric of checkpoint.best, or val_loss."
        ),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="min or max; required only for custom metrics.")] = None,
    study: Annotated[str | None, typer.Option(help="The name of the study; by default the config's name.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="The URL of Optuna's database; by default study.db in the study's folder.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="Optuna's sampler: tpe or random.")] = "tpe",
    pruner: Annotated[
        str, typer.Option(help="Optuna's pruner, which stops poor trials early: median, hyperband or none.")
    ] = "median",
    seed: Annotated[int | None, typer.Option(help="The seed of the sampler; by default the config's seed.")] = None,
    engine: Annotated[
        str, typer.Option(help="Where trials run: optuna (on this machine) or ray (on a Ray cluster).")
    ] = "optuna",
    run_dir: Annotated[Path | None, typer.Option(help="The folder of the study; by default runs/NAME-tune.")] = None,
) -> None:
    """Search for good hyperparameters with many runs.

    Example: paceline tune config.yaml --trials 20 optimizer.lr=log:1e-4:1e-1
    """
    from paceline import config
    from paceline.tools.tune import space

    if find_spec("optuna") is None:
        raise MissingExtra("optuna", "tune", "paceline tune")
    if engine == "ray" and find_spec("ray") is None:
        raise MissingExtra("ray", "ray", "--engine ray")
    path = find_config(target)
    searched, fixed = space.parse(words or [])
    raw = config.read_yaml(path)
    config.override(raw, fixed)
    if procs is not None:
        raw["procs"] = procs
    from paceline.tools.tune.tune import TunePlan
    from paceline.tools.tune.tune import tune as run_search

    plan = TunePlan(
        raw, path.parent.resolve(), searched, trials=trials, parallel=parallel, metric=metric, mode=mode, study=study,
        storage=storage, sampler=sampler, pruner=pruner, seed=seed, engine=engine, run_dir=run_dir,
    )  # fmt: skip
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("starting") if console.is_terminal else nullcontext() as status:
        found = run_search(
            plan,
            log=lambda text: console.print(text, markup=False),
            show_status=lambda text: status.update(escape(text)) if status is not None else None,
        )
    _show(found)


def _show(found: TuneResult) -> None:
    from paceline.tools.tune.report import shown

    table = Table("trial", "state", found.goal.metric, "epochs", "seconds", *found.best.values, box=None)
    for row in found.rows[:TRIALS_SHOWN]:
        value = "" if row.value is None else f"{row.value:.6g}"
        table.add_row(
            str(row.number), row.state, value, str(row.epochs), f"{row.seconds:.1f}", *map(shown, row.values.values())
        )
    show_table(table)
    if len(found.rows) > TRIALS_SHOWN:
        typer.echo(f"and {len(found.rows) - TRIALS_SHOWN} more")
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"best: trial {found.best.number}, {found.goal.metric} {found.best.value:.6g}, {found.best.run_dir}")
    typer.echo(f"see {found.folder.path}: best.yaml, trials.csv{'' if found.notes else ', plots.html'}")
    typer.echo("try next:")
    typer.echo(f"  paceline train {quote(str(found.folder.best))}")
    typer.echo(f"  paceline board {quote(str(found.folder.path))}     # the curves of all trials, in TensorBoard")
