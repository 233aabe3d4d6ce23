"""`paceline train`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import Target, build_config
from paceline.cli.output import is_main

if TYPE_CHECKING:
    from paceline.result import Result


def train(
    target: Target,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, such as optimizer.lr=3e-4."),
    ] = None,
    procs: Annotated[
        str | None, typer.Option(help="How many processes, or 1:4; one per GPU by default, else 1.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="How many hosts, or 1:4; the same command runs on each.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the hosts meet: one of them, and a free port.")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="local, torchrun, slurm or ray; found by itself.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME/DATE-TIME by default.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on with the unfinished run; never; or a run folder or checkpoint.")
    ] = None,
) -> None:
    """Train what a config describes: paceline train config.yaml batch_size=128 optimizer.lr=3e-4 --procs 4"""
    from paceline.trainer import Trainer

    built, folder = build_config(
        target, overrides, procs=procs, nodes=nodes, rendezvous=rendezvous, launcher=launcher, run_dir=run_dir,
        resume=resume,
    )  # fmt: skip
    _say_done(Trainer.from_config(built, folder).start(), target)


def _say_done(result: Result, target: str) -> None:
    if not is_main():
        return
    facts = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    typer.echo(f"done: step {result.step}{'  ' + facts if facts else ''}  weights {result.weights_sha256[:12]}")
    typer.echo(f"run folder: {result.run_dir}")
    typer.echo("try next:")
    typer.echo(f"  paceline train {quote(target)} --procs 1 num_epochs=2     # other processes, other values")
    if result.metrics:
        typer.echo(f"  paceline evaluate {quote(str(result.run_dir))}")
    typer.echo("  paceline board                                     # curves, in TensorBoard")
    typer.echo("  paceline init mylab                                # a folder of your own")
