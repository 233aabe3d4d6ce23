"""The error for an option that no command has, such as `--lr`: it names the key of the config to write instead."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from paceline.errors import ConfigError

UsageError: Any = typer.BadParameter.__base__  # of the click that typer uses, which may be typer's own copy

EXAMPLES = {  # values of options that are given without one
    "resume": "auto", "procs": "2", "nodes": "2", "rendezvous": "HOST:29400", "launcher": "local", "run-dir": "runs/x",
}  # fmt: skip


class AnsweringGroup(TyperGroup):
    """A group of commands that answers `--lr` with the key to write, instead of "No such option"."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            option, command = getattr(error, "option_name", None), error.ctx and error.ctx.command
            example = EXAMPLES.get(str(option).lstrip("-"))
            if example and type(error).__name__ == "BadOptionUsage":
                raise ConfigError(f"{option} has no value; write for instance {option} {example}") from None
            takes_keys = command is not None and any(each.name == "overrides" for each in command.params)
            if option and takes_keys and (key := key_of(option.lstrip("-").replace("-", "_"))):
                raise ConfigError(f"{option} is not an option but a key; write {key}=…, without dashes") from None
            raise


def key_of(name: str) -> str | None:
    """The key of a config that an option may mean."""
    from paceline.config import Config, answers

    keys = [answers.key_of(row.write) for row in answers.rows_of(name) if row.write]
    return name if name in Config.model_fields else next(iter(keys), None)
