"""`paceline train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import RECIPE_CONFIGS, Target, build_config, find_config
from paceline.cli.output import is_main
from paceline.system.startup import requests_noted

if TYPE_CHECKING:
    from paceline.results.result import Result

# What the command that is suggested after a run says otherwise, or must not say again.
SAID_ANEW = ("num_epochs", "procs", "nodes", "rendezvous", "run_dir", "resume")


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
    """Train the model that a config describes.

    Example: paceline train config.yaml batch_size=128 optimizer.lr=3e-4 --procs 4
    """
    with requests_noted():
        from paceline.trainer import Trainer

        built, folder = build_config(
            target, overrides, procs=procs, nodes=nodes, rendezvous=rendezvous, launcher=launcher, run_dir=run_dir,
            resume=resume,
        )  # fmt: skip
    _say_done(Trainer.from_config(built, folder).start(), target, overrides or [])


def _say_done(result: Result, target: str, overrides: Sequence[str]) -> None:
    if not is_main():
        return
    from paceline.formatting import outcome_text

    typer.echo(f"done: {outcome_text(result.step, result.metrics, result.weights_sha256)}")
    typer.echo(f"run folder: {result.run_dir}")
    typer.echo("try next:")
    for line in next_steps(result, target, overrides):
        typer.echo(f"  {line}")


def next_steps(result: Result, target: str, overrides: Sequence[str]) -> list[str]:
    """Commands that are worth a try after a run, as lines for a shell."""
    from paceline.run.layout import RunFolder

    words = [target, *(word for word in overrides if word.partition("=")[0] not in SAID_ANEW)]
    folder = quote(str(result.run_dir))
    lines = [f"paceline train {' '.join(map(quote, words))} --procs 1 num_epochs=2     # other processes, other values"]
    if result.metrics:
        lines.append(f"paceline evaluate {folder}")
    if any(RunFolder(result.run_dir).tensorboard.glob("*")):
        lines.append(f"paceline board {folder}     # curves, in TensorBoard")
    if find_config(target) in RECIPE_CONFIGS.values():
        lines.append("paceline init mylab     # a folder of your own")
    return lines
