"""The command line: argv to commands, and the only place that ends the process.

A command is a function of a module here, and a line of `COMMANDS`. torch, and most of Paceline, are imported by the
commands that need them, never to show help.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli import bench, compare, doctor, profile, project, slurm, train, trained, tune, views
from paceline.cli.output import print_error
from paceline.errors import ConfigError, Interrupted, PacelineError
from paceline.system.paths import problem_with

Command = Callable[..., None]

# In the order of `paceline --help`.
COMMANDS: list[Command] = [
    train.train,
    slurm.submit,
    slurm.status,
    slurm.watch,
    slurm.logs,
    slurm.cancel,
    compare.compare,
    tune.tune,
    bench.bench,
    profile.profile,
    trained.evaluate,
    trained.predict,
    trained.export,
    trained.checkpoints,
    views.board,
    views.report,
    doctor.doctor,
    project.init,
]


def main() -> None:
    """The entry point: runs a command and turns its errors into a few words and an exit code."""
    try:
        app()
    except PacelineError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print_error(problem)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output, `head` for instance, has gone; the run itself is done
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(0)


def _interruptible(command: Command) -> Command:
    """Ctrl-C ends a command with one line; typer would end it without a word. Paths are checked before it runs."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        _check_paths(arguments)
        try:
            command(**arguments)
        except KeyboardInterrupt as interrupt:
            raise Interrupted("; ".join(["stopped by Ctrl-C", *map(str, interrupt.args)])) from None

    return run


def _check_paths(arguments: Mapping[str, Any]) -> None:
    """Refuse what no file or folder of this machine can be called, wherever a command takes a path."""
    for name, value in arguments.items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and (problem := problem_with(path)):
                raise ConfigError(f"{name}={path} {problem}")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


def _app() -> typer.Typer:
    app = typer.Typer(
        help="Train PyTorch models with Distributed Data Parallel: one run, one hash, from a laptop to a cluster.",
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(_root)
    for command in COMMANDS:
        app.command()(_interruptible(command))
    app.add_typer(_getter("Download the data sets that recipes use.", project.get_data), name="data")
    app.add_typer(_getter("Download pretrained models from the Hugging Face hub.", project.get_model), name="model")
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `paceline` itself."""


def _getter(about: str, get: Command) -> typer.Typer:
    """A group of one command, `get`."""
    group = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)
    group.command("get")(_interruptible(get))
    return group


app = _app()
