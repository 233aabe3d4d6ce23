"""Arguments that several commands share (CONFIG, overrides, run folders, lists of numbers), and their parsing."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.formatting import printable

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.run.layout import RunFolder

PACKAGE = Path(__file__).parents[1]
RECIPES = PACKAGE / "recipes"


def _recipe_name(path: Path) -> str:
    """The name of a recipe: its folder's name for a config.yaml, else the file's name."""
    return path.parent.name if path.stem == "config" else path.stem


RECIPE_CONFIGS = dict(sorted((_recipe_name(path), path) for path in RECIPES.glob("*/*.yaml")))

CONFIG = typer.Argument(metavar="CONFIG", help=f"A config.yaml, or a recipe: {', '.join(RECIPE_CONFIGS)}.")
Target = Annotated[str, CONFIG]
Run = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run folder; by default the newest one in runs.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set.")]
Procs = Annotated[
    str | None, typer.Option(help="The number of processes, or a range such as 1:4; by default one per GPU, or 1.")
]


def find_config(target: str) -> Path:
    """The config file of a path, a folder or the name of a recipe."""
    if target.endswith(".py"):
        raise ConfigError(f"{target} is a script, not a config; run it with: python {target}")
    for path in (Path(target), Path(target) / "config.yaml"):
        if path.is_file():
            return path
    if target in RECIPE_CONFIGS:
        return RECIPE_CONFIGS[target]
    raise ConfigError(f"{target} is neither a file nor a recipe; {hint(target, *map(str, Path().glob('*.yaml')))}")


def hint(name: str, *others: str) -> str:
    """A suggestion for an unknown name: the closest known name, or the list of recipes."""
    near = difflib.get_close_matches(name, [*RECIPE_CONFIGS, *others], n=1)
    return f"did you mean {near[0]}?" if near else f"recipes: {', '.join(RECIPE_CONFIGS)}"


def build_config(target: str, overrides: list[str] | None, **options: Any) -> tuple[Config, Path]:
    """The config that a command line describes, and the folder of its file."""
    from paceline import config, launch, trainer

    path = find_config(target)
    raw = config.read_yaml(path)
    overridden = config.override(raw, overrides or [])
    raw |= {key: value for key, value in options.items() if value is not None}
    folder = path.parent.resolve()
    launch.prepare(raw, folder)  # the processes of the ranks import torch while `build_config` imports it here
    return trainer.build_config(raw, folder, overridden), folder


def newest_run() -> Path:
    """The run in `runs` that was started last; prints its path."""
    from paceline.run.layout import newest_run_below

    found = newest_run_below(Path("runs"))
    if found is None:
        raise ConfigError("the folder runs contains no run; give a run folder")
    typer.echo(printable(f"using the newest run: {found}"), err=True)
    return found


def folder_of(run: str) -> Path:
    """The folder of a run that is given as a path, or as the URL of a mirror: then a copy without the weights."""
    from paceline.mirror.reading import folder_of_run

    return folder_of_run(run)


def find_run(path: Path) -> RunFolder:
    """The folder of a run that was started or submitted."""
    from paceline.run.layout import RunFolder

    folder = RunFolder(path.resolve())
    if not folder.holds_run():
        raise ConfigError(f"{path} is not a run folder; give one, such as runs/NAME/2026-01-02_10-00-00")
    return folder


def parse_numbers(option: str, text: str) -> list[int]:
    """The numbers in a list such as 1,2,4."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option} {text} is not a list of numbers; write, for example, --{option} 1,2,4") from None
    if min(numbers) < 1:
        raise ConfigError(f"--{option} {text} contains a number below 1; use numbers of at least 1")
    return numbers
