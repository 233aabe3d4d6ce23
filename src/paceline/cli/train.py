"""`paceline train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import RECIPE_CONFIGS, Target, build_config, find_config
from paceline.cli.output import is_main
from paceline.system.signals import requests_deferred

if TYPE_CHECKING:
    from paceline.results.result import Result

# Overrides that `next_steps` does not repeat, because the suggested command sets them itself or needs none.
NOT_REPEATED = ("num_epochs", "procs", "nodes", "rendezvous", "run_dir", "resume")


def train(
    target: Target,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set, such as optimizer.lr=3e-4."),
    ] = None,
    procs: Annotated[
        str | None,
        typer.Option(help="The number of processes, or a range such as 1:4; by default one per GPU, or 1."),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="The number of hosts, or a range; run the same command on each host.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The address of one of the hosts, and a free port on it.")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="local, torchrun, slurm or ray; detected by default.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; by default runs/NAME/DATE-TIME.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="auto (resume an unfinished run, if there is one), never, a run folder, a checkpoint, or the URL of a "
            "mirrored run."
        ),
    ] = None,
) -> None:
    """Train the model that a config describes.

    Example: paceline train config.yaml batch_size=128 optimizer.lr=3e-4 --procs 4
    """
    with requests_deferred():
        from paceline.trainer import Trainer

        built, folder = build_config(
            target, overrides, procs=procs, nodes=nodes, rendezvous=rendezvous, launcher=launcher, run_dir=run_dir,
            resume=resume,
        )  # fmt: skip
    result = Trainer.from_config(built, folder).start()
    _show_result(result, target, overrides or [], can_evaluate=built.train_fn is None or built.loss_fn is not None)


def _show_result(result: Result, target: str, overrides: Sequence[str], *, can_evaluate: bool) -> None:
    if not is_main():
        return
    from paceline.formatting import outcome_text

    typer.echo(f"done: {outcome_text(result.step, result.metrics, result.weights_sha256)}")
    typer.echo(f"run folder: {result.run_dir}")
    typer.echo("try next:")
    for line in next_steps(result, target, overrides, can_evaluate=can_evaluate):
        typer.echo(f"  {line}")


def next_steps(result: Result, target: str, overrides: Sequence[str], *, can_evaluate: bool = True) -> list[str]:
    """Shell commands that are useful after a run."""
    from paceline.run.layout import RunFolder

    words = [target, *(word for word in overrides if word.partition("=")[0] not in NOT_REPEATED)]
    folder = quote(str(result.run_dir))
    lines = [f"paceline train {' '.join(map(quote, words))} --procs 1 num_epochs=2     # change processes and keys"]
    if result.metrics and can_evaluate:
        lines.append(f"paceline evaluate {folder}")
    if any(RunFolder(result.run_dir).tensorboard.glob("*")):
        lines.append(f"paceline board {folder}     # curves in TensorBoard")
    if find_config(target) in RECIPE_CONFIGS.values():
        lines.append("paceline init mylab     # your own project")
    return lines
