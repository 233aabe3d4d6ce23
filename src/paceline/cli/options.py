"""Config keys that are typed as options, such as `--num_epochs 5`, and names of other libraries, such as `--epochs 5`.

Each is replaced by the key or the option that it means before the command parses its arguments, or rejected with the
words to type instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.arguments import find_config
from paceline.cli.output import is_main
from paceline.errors import ConfigError
from paceline.formatting import printable

UsageError: Any = typer.BadParameter.__base__  # of the click that typer uses, which may be typer's own copy

KEYS = "[KEY=VALUE]..."  # the metavar of the argument that receives them
OPTION = re.compile(r"--[A-Za-z]|-[A-Za-z][\w-]")  # also -lr, as argparse allows; not -1
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "0", "1")

EXAMPLES = {  # example values for options that are given without a value
    "resume": "auto", "procs": "2", "nodes": "2", "rendezvous": "HOST:29400", "launcher": "local", "run-dir": "runs/x",
}  # fmt: skip


class AnsweringGroup(TyperGroup):
    """A group of commands whose error for an option without a value contains an example."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            option = getattr(error, "option_name", None)
            example = EXAMPLES.get(str(option).lstrip("-"))
            if example and type(error).__name__ == "BadOptionUsage":
                raise ConfigError(f"{option} has no value; write, for example, {option} {example}") from None
            raise


class ConfigCommand(TyperCommand):
    """A command that also accepts config keys as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace the options that are keys or names of other libraries, then parse."""
        if any(param.metavar == KEYS for param in self.params):
            args = translated(args, _own_options(self.params))
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class Typed(NamedTuple):
    """An option that the command does not define."""

    option: str  # as it was typed, without its value
    name: str  # without dashes at its beginning, with underscores
    text: str | None

    def __str__(self) -> str:
        return self.option if self.text is None else f"{self.option} {quote(self.text)}"


def translated(args: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """The arguments of a command with its own options only; prints what the others mean.

    `own` are the names of its own options, and whether each takes a value.
    """
    typed, rest, chosen = _separated(args, own)
    if not typed:
        return rest
    context = OptionReader(own, rest, chosen)
    problems, lines, found = list[str](), list[str](), dict[str, tuple[Typed, str]]()
    for option in typed:
        try:
            key, word, line = context.meaning_of(option)
        except ConfigError as error:
            problems += error.problems
            continue
        lines += filter(None, [line])
        before, earlier = found.setdefault(key, (option, word))
        if earlier != word:
            problems.append(f"{before} and {option} both set {key}; keep one of them")
    if problems:
        raise ConfigError(problems)
    for line in lines if is_main() else ():
        typer.echo(printable(line), err=True)
    words = [word for _, word in found.values()]
    return [*filter(OPTION.match, words), *rest, *filter(ASSIGNMENT.match, words)]


def _own_options(params: Sequence[Any]) -> dict[str, bool]:
    names = {
        option.lstrip("-").replace("-", "_"): not param.is_flag
        for param in params if param.param_type_name == "option"
        for option in (*param.opts, *param.secondary_opts)
    }  # fmt: skip
    return {**names, "help": False}


def _separated(args: Sequence[str], own: Mapping[str, bool]) -> tuple[list[Typed], list[str], dict[str, str]]:
    """The options that a command does not define, all other words, and the values of the options that it defines."""
    typed, rest, chosen = list[Typed](), list[str](), dict[str, str]()
    pending = list(args)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return typed, [*rest, word, *pending], chosen
        if not OPTION.match(word):
            rest.append(word)
            continue
        option, has_value, text = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if name in own:
            if own[name] and not has_value and pending:
                has_value, text = "=", pending.pop(0)
            rest.append(f"--{name.replace('_', '-')}{has_value}{text}")
            chosen[name] = text
            continue
        has_target = any(not OPTION.match(each) and not ASSIGNMENT.match(each) for each in rest)
        if not has_value and pending and _is_value(pending[0], name, has_target=has_target):
            has_value, text = "=", pending.pop(0)
        typed.append(Typed(option, name, text if has_value else None))
    return typed, rest, chosen


def _is_value(word: str, name: str, *, has_target: bool) -> bool:
    """Whether the word after an option is its value, not the config or another key."""
    if word == "--" or OPTION.match(word) or ASSIGNMENT.match(word):
        return False
    return word.lower() in BOOLEANS or has_target or not _is_switch(name)


def _is_switch(name: str) -> bool:
    """Whether an option may have no value."""
    from paceline.config import Config, answers

    if name in Config.model_fields:
        annotation = Config.model_fields[name].annotation
        return bool in (annotation, *get_args(annotation))
    return answers.is_switch(name)


class OptionReader:
    """Translates the options of one command line, given its config and its other words."""

    def __init__(self, own: Mapping[str, bool], words: Sequence[str], chosen: Mapping[str, str]) -> None:
        from paceline import config
        from paceline.launch.environment import load_dotenv, rendezvous_in_environment

        self.own, self.given, self.folder = own, dict[str, Any](), Path()
        assignments = [word for word in words if ASSIGNMENT.match(word)]
        target = next((word for word in words if not OPTION.match(word) and word not in assignments), None)
        try:
            if target is not None:
                path = find_config(target)
                self.given = config.read_yaml(path)
                self.folder = path.parent.resolve() / str(self.given.get("folder") or "")
                load_dotenv(path.parent)  # the user's modules may read it
            config.override(self.given, assignments)
        except ConfigError:  # the command itself reports it
            pass
        self.given |= {name: text for name, text in chosen.items() if name in config.Config.model_fields}
        if rendezvous := rendezvous_in_environment():
            self.given.setdefault("rendezvous", rendezvous)

    def meaning_of(self, option: Typed) -> tuple[str, str, str]:
        """The key that an option sets, the word to use instead, and the line to print; else a ConfigError."""
        from paceline.config import Config, answers
        from paceline.config.yaml import parse

        name, text = option.name, option.text
        is_known = name.partition(".")[0] in Config.model_fields or bool(answers.rows_of(name))
        if text is None and is_known and not _is_switch(name):
            raise ConfigError(f"{option} has no value; write {option} VALUE")
        text = "true" if text is None else text
        if name.partition(".")[0] in Config.model_fields:
            return name, f"{name}={text}", ""
        value = parse(text)
        if isinstance(value, dict) and not any(value.values()):
            value = text  # {32,64}, the values of a search
        if setting := answers.setting_of(name, value, self.given):
            return self._as_word(option, value, text, *setting)
        takers = list(self._functions_with(name))
        if len(takers) == 1:
            word = f"{takers[0]}.{name}={text}"
            return f"{takers[0]}.{name}", word, f"{option} means {quote(word)}"
        if takers:
            words = " ".join(quote(f"{taker}.{name}={text}") for taker in takers)
            raise ConfigError(f"{option} is an argument of model_fn and of dataset_fn; write {words}, or one of them")
        if advice := answers.advice_on_key(name, value, self.given):
            raise ConfigError(f"{option} {advice}")
        raise ConfigError(f"{option.option} is not an option; {self._hint(name)}")

    def _as_word(self, option: Typed, value: Any, text: str, key: str, setting: Any, note: str) -> tuple[str, str, str]:
        """Write a setting as an option of the command, or as KEY=VALUE."""
        from paceline.config import in_one_line

        text = text if setting == value else in_one_line(setting)
        if "gpu" in option.name and key == "procs" and "gpus_per_node" in self.own:
            raise ConfigError(
                f"{option} has two meanings here; write --gpus-per-node {quote(text)} or --procs {quote(text)}"
            )
        has_option = self.own.get(key, False)
        word = f"--{key.replace('_', '-')}={text}" if has_option else f"{key}={text}"
        shown = f"--{key.replace('_', '-')} {quote(text)}" if has_option else quote(word)
        return key, word, f"{option} means {shown}" + (f", {note}" if note else "")

    def _functions_with(self, name: str) -> Iterator[str]:
        """`model_args` and `dataset_args`, if their function has an argument with this name."""
        for key in ("model", "dataset"):
            if name in (self._arguments_of(f"{key}_fn") or ()):
                yield f"{key}_args"

    def _arguments_of(self, key: str) -> list[str] | None:
        """The names of the arguments of a function of the config; None if it cannot be imported or takes any."""
        from paceline.config.functions import FunctionNotFound, resolve
        from paceline.config.signatures import arguments_of

        name = self.given.get(key)
        if not isinstance(name, str):
            return None
        try:
            return arguments_of(resolve(name, self.folder))
        except (ConfigError, FunctionNotFound):  # the command itself reports it
            return None

    def _hint(self, name: str) -> str:
        """A suggestion for an unknown option: the closest option, or the lists of options."""
        from paceline.config import Config
        from paceline.config.other_names import TABLE

        taken = {key: self._arguments_of(key) for key in ("model_fn", "dataset_fn")}
        others = [each for rows in TABLE.values() for row in rows for each in row.names]
        for known in (self.own, Config.model_fields, *filter(None, taken.values()), others):
            if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
                return f"did you mean --{near[0].replace('_', '-') if known is self.own else near[0]}?"
        lists = [
            f"{key} accepts {', '.join(names) or 'no arguments'}" for key, names in taken.items() if names is not None
        ]
        if lists and name.isidentifier():
            lists.append(f"to set {name} with this option, add it to the parameters of one of them")
        return "; ".join(lists) or "use --help to list the options; docs/configuration.md lists the keys of a config"
