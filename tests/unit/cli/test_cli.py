"""Commands that run in the test process: their output, their arguments, and commands of other packages."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from paceline import cli
from paceline.cli.arguments import RECIPE_CONFIGS
from paceline.cli.train import next_steps
from paceline.errors import ConfigError, PacelineError
from paceline.observe.events import Events
from paceline.run.layout import RunFolder


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def test_what_to_try_next_repeats_the_overrides_for_a_shell(tmp_path: Path) -> None:
    result = SimpleNamespace(run_dir=tmp_path, metrics={"accuracy": 1.0})
    overrides = ["df=my table.csv", "num_epochs=9", "procs=4", "run_dir=here", "optimizer={name: sgd, lr: 3}"]
    again, *others = next_steps(result, "tabular", overrides)
    repeated = ["df=my table.csv", "optimizer={name: sgd, lr: 3}"]
    assert words(again) == ["paceline", "train", "tabular", *repeated, "--procs", "1", "num_epochs=2"]
    assert [words(line) for line in others] == [["paceline", "evaluate", str(tmp_path)], ["paceline", "init", "mylab"]]


def test_an_evaluation_is_not_suggested_without_a_loss(tmp_path: Path) -> None:
    result = SimpleNamespace(run_dir=tmp_path, metrics={"accuracy": 1.0})
    lines = next_steps(result, "digits", [], can_evaluate=False)
    assert not any("evaluate" in line for line in lines)


def test_curves_are_suggested_if_there_are_any_and_a_project_after_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    result = SimpleNamespace(run_dir=tmp_path / "run", metrics={})
    assert len(next_steps(result, str(tmp_path), [])) == 1
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    assert len(next_steps(result, str(tmp_path), [])) == 1
    (tmp_path / "run" / "tensorboard" / "events.out").touch()
    assert words(next_steps(result, str(tmp_path), [])[1]) == ["paceline", "board", str(tmp_path / "run")]


@pytest.mark.parametrize("recipe", RECIPE_CONFIGS)
def test_the_copy_of_a_recipe_is_trained_as_the_recipe_is(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["init", "my lab", "--recipe", recipe], standalone_mode=False)
    _, *lines = capsys.readouterr().out.splitlines()
    commands = [words(line) for line in lines]
    assert commands[-1] == ["cd", "my lab", "&&", "paceline", "train", "config.yaml", "num_epochs=5"]
    brings = {"lm": ["data"], "mnist": ["data"], "tabular": ["data"], "text": ["data", "model"]}
    assert [command[1:3] for command in commands[:-1]] == [[what, "get"] for what in brings.get(recipe, [])]


HOSTILE, SHOWN = "\x1b]0;owned\x07\x1b[2J", "\\x1b]0;owned\\x07\\x1b[2J"


def terminal_output(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The output of `paceline ARGUMENTS` on a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit):
        cli.main()
    return screen.getvalue()


def test_texts_of_a_run_cannot_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / f"run{HOSTILE}")
    folder.logs.mkdir(parents=True)
    folder.config.touch()
    folder.log(0).write_text(f"printed {HOSTILE}\n")
    with closing(Events(folder.events)) as events:
        events.write("run_started", name=f"lab{HOSTILE}", world_size=2)
        events.write("epoch", epoch=0, step=12, **{f"accuracy{HOSTILE}": 0.75})
        events.write("run_failed", text=f"rank 1 failed{HOSTILE}")
    step = folder.checkpoints / "step-12"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({f"x{HOSTILE}": 1}))
    (folder.checkpoints / f"damaged-step-9{HOSTILE}").mkdir()
    for command in ("status", "logs", "checkpoints", "cancel"):
        shown = terminal_output(monkeypatch, command, str(folder.path))
        assert "\x1b]" not in shown, command
        assert "\x1b[2J" not in shown, command
    shown = terminal_output(monkeypatch, "status", str(folder.path))
    assert f"lab{SHOWN}: 2 ranks" in shown
    assert f"accuracy{SHOWN} 0.7500" in shown
    assert f"failed: rank 1 failed{SHOWN}" in shown
    assert f"{SHOWN} is not a Slurm job" in terminal_output(monkeypatch, "cancel", str(folder.path)).replace("\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--run-dir"],
        ["submit", "digits", "--dry-run", "--run-dir"],
        ["tune", "digits", "--run-dir"],
        ["report", "--out"],
        ["export", "runs/x", "--format", "torch", "--to"],
    ],
    ids=" ".join,
)
def test_no_command_takes_a_url_for_a_path(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        cli.app([*words, "s3://bucket/run"], standalone_mode=False)
    [problem] = caught.value.problems
    assert problem.endswith("=s3:/bucket/run is a URL, which Paceline cannot read or write; give a local path")
    assert list(tmp_path.iterdir()) == []


PLUGIN = """
import typer

def hello(name: str, times: int = 1) -> None:
    "Print a greeting."
    typer.echo(f"hello {name} " * times)

tools = typer.Typer(help="More tools.")
tools.command("a")(hello)
tools.command("b")(hello)
number = 3
"""
ENTRY_POINTS = """
[paceline.commands]
hello = pl_plugin:hello
tools = pl_plugin:tools
train = pl_plugin:hello
missing = pl_plugin:missing
number = pl_plugin:number
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package, pl-plugin, that adds commands to `paceline`, three of them in vain."""
    (tmp_path / "pl_plugin.py").write_text(PLUGIN)
    folder = tmp_path / "pl_plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pl-plugin\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
def test_help_lists_the_commands_of_other_packages_after_ours_and_reports_those_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    listed = [line.split(maxsplit=1) for line in shown.out.partition("Commands:\n")[2].splitlines()]
    ours = dict.fromkeys(words.split()[0] for words in cli.COMMANDS)
    assert [name for name, _ in listed] == [*ours, "hello", "tools"]
    assert [about for _, about in listed[-2:]] == ["Print a greeting.", "More tools."]
    assert listed[0] == ["train", "Train the model that a config describes."]  # a package cannot replace it
    missing, number = shown.err.splitlines()
    assert missing.startswith("paceline: the command missing of pl-plugin cannot be loaded: AttributeError: ")
    assert missing.endswith("; update or uninstall pl-plugin")
    assert "the command number of pl-plugin cannot be loaded: TypeError: it is neither a function nor" in number


@pytest.mark.usefixtures("plugin")
def test_commands_of_other_packages_run_with_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["hello", "you", "--times", "2"], standalone_mode=False)
    cli.app(["tools", "b", "all"], standalone_mode=False)
    assert capsys.readouterr().out == "hello you hello you \nhello all \n"
    with pytest.raises(PacelineError, match="the command missing of pl-plugin cannot be loaded"):
        cli.app(["missing"], standalone_mode=False)


@pytest.mark.usefixtures("plugin")
def test_other_packages_are_not_imported_for_a_command_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor a recipe"):
        cli.app(["train", "nothing"], standalone_mode=False)
    assert "pl_plugin" not in sys.modules


def test_every_command_is_documented() -> None:
    """Each has a summary that `paceline --help` shows whole, and each option a help text."""
    for words, command in cli.COMMANDS.items():
        assert command.__doc__ is not None
        assert len(command.__doc__.partition("\n")[0]) <= 65, words
        for name, annotation in get_type_hints(command, include_extras=True).items():
            if name != "return":
                assert any(getattr(extra, "help", None) for extra in annotation.__metadata__), (words, name)
