"""The command line: registers the commands, runs one of them, and is the only place that
ends the process of a command.

A command is a function in a module of this package and an entry in `COMMANDS`; other packages add commands by entry
points (`extensions.py`). Commands import torch and most of Paceline inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli import bench, compare, doctor, plan, profile, project, slurm, train, trained, tune, views
from paceline.cli.extensions import ExtensibleGroup
from paceline.cli.options import ConfigCommand
from paceline.cli.output import print_error
from paceline.errors import ConfigError, Interrupted, PacelineError
from paceline.system.paths import problem_with

Command = Callable[..., None]

# In the order of `paceline --help`.
COMMANDS: dict[str, Command] = {
    "train": train.train,
    "submit": slurm.submit,
    "status": slurm.status,
    "watch": slurm.watch,
    "logs": slurm.logs,
    "cancel": slurm.cancel,
    "compare": compare.compare,
    "tune": tune.tune,
    "bench": bench.bench,
    "profile": profile.profile,
    "plan": plan.plan,
    "evaluate": trained.evaluate,
    "predict": trained.predict,
    "export": trained.export,
    "checkpoints": trained.checkpoints,
    "board": views.board,
    "report": views.report,
    "doctor": doctor.doctor,
    "init": project.init,
    "schema": project.schema,
    "data get": project.get_data,
    "model get": project.get_model,
}
GROUPS = {
    "data": "Download the data sets that recipes use.",
    "model": "Download pretrained models from the Hugging Face hub.",
}


def main() -> None:
    """Run a command, print its errors on one line each, and exit with their code."""
    try:
        app()
    except PacelineError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print_error(problem)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited; the run itself is complete
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(0)


def _interruptible(command: Command) -> Command:
    """Wrap a command: check its paths before it runs, and print one line on Ctrl-C, where typer prints none."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        _check_paths(arguments)
        try:
            command(**arguments)
        except KeyboardInterrupt as interrupt:
            raise Interrupted("; ".join(["stopped by Ctrl-C", *map(str, interrupt.args)])) from None

    return run


def _check_paths(arguments: Mapping[str, Any]) -> None:
    """Reject arguments that cannot be the path of a local file or folder."""
    for name, value in arguments.items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and (problem := problem_with(path)):
                raise ConfigError(f"{name}={path} {problem}")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"paceline {__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


def _app() -> typer.Typer:
    app = typer.Typer(
        cls=ExtensibleGroup,
        help="Train PyTorch models with Distributed Data Parallel: one run, one hash, from a laptop to a cluster.",
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(_root)
    apps = {"": app}
    for group, about in GROUPS.items():
        apps[group] = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)
        app.add_typer(apps[group], name=group)
    for words, command in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        apps[group].command(name, cls=ConfigCommand)(_interruptible(command))
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `paceline` without a command."""


app = _app()
