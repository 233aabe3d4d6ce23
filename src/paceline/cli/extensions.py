"""Commands of other packages: entry points of the group `paceline.commands`, each a function or a `typer.Typer`.

An entry point is loaded when help lists it or when its command is called, so it does not slow down other commands.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.main import get_group

from paceline.cli.options import AnsweringGroup
from paceline.cli.output import print_error
from paceline.errors import PacelineError

GROUP = "paceline.commands"


class ExtensibleGroup(AnsweringGroup):
    """Paceline's commands, followed by those of entry points, which cannot replace a command of Paceline."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands that can be loaded; reports each other command in one line on stderr."""
        names = super().list_commands(ctx)
        for name in sorted(entry_points(group=GROUP).names - self.commands.keys()):
            try:
                self.get_command(ctx, name)
            except PacelineError as error:
                print_error(str(error))
            else:
                names.append(name)
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command with a name, or None. Raises PacelineError if its entry point cannot be loaded."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        return next(map(_load, entry_points(group=GROUP, name=cmd_name)), None)


def _load(entry: EntryPoint) -> Any:
    """The command of an entry point. Raises PacelineError if the entry point cannot be loaded."""
    app = typer.Typer(rich_markup_mode=None)
    try:
        loaded = entry.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=entry.name)
        elif callable(loaded):
            app.command(entry.name)(loaded)
        else:
            raise TypeError("it is neither a function nor a typer.Typer")
        return get_group(app).commands[entry.name]
    except (Exception, SystemExit) as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise PacelineError(
            f"the command {entry.name} of {package} cannot be loaded: {problem}; update or uninstall {package}"
        ) from error
