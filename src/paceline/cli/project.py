"""`paceline init`, `schema`, `data get` and `model get`: a new project, its JSON schema, its data and its model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from paceline.cli.arguments import PACKAGE, RECIPE_CONFIGS, hint
from paceline.errors import ConfigError

TEMPLATES = PACKAGE / "templates"
SCHEMA = "config.schema.json"  # beside a new project's config.yaml
OWN_LOOP = [TEMPLATES / "project", TEMPLATES / "own_loop"]
MANAGED = [TEMPLATES / "project", TEMPLATES / "managed"]


def init(
    folder: Annotated[Path, typer.Argument(help="The folder to create.")],
    managed: Annotated[bool, typer.Option("--managed", help="Use the managed loop, without train.py.")] = False,
    recipe: Annotated[str | None, typer.Option(help=f"Copy a recipe: {', '.join(RECIPE_CONFIGS)}.")] = None,
) -> None:
    """Create a project folder that is ready to train.

    Writes model_fn.py, dataset_fn.py, train.py (your loop), main.py, config.yaml with a schema for editors, train.slurm
    and a small data set.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not an empty folder; choose another name")
    if recipe is not None and recipe not in RECIPE_CONFIGS:
        raise ConfigError(f"--recipe {recipe} is unknown; {hint(recipe)}")
    if recipe is not None and managed:
        raise ConfigError(f"--managed and --recipe {recipe} are both given; keep one of them")
    if recipe is not None:
        _copy([RECIPE_CONFIGS[recipe].parent], folder, "*.yaml")
        shutil.copy(RECIPE_CONFIGS[recipe], folder / "config.yaml")
    else:
        _copy(MANAGED if managed else OWN_LOOP, folder)
        _rename(folder)
    _add_schema(folder)
    typer.echo(f"{folder} is ready. Next:")
    for line in _commands(folder, recipe):
        typer.echo(f"  {line}")


def _copy(sources: list[Path], folder: Path, *left_out: str) -> None:
    """Copy the files of several folders into one."""
    for source in sources:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", *left_out))


def _rename(folder: Path) -> None:
    """Replace the template's name with the folder's name in the two files that name the run."""
    from paceline.config.yaml import dump_yaml

    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name)
    for file, old, new in (
        ("config.yaml", "name: mylab\n", dump_yaml({"name": name})),
        ("main.py", 'name="mylab"', f'name="{name}"'),
    ):
        path = folder / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def _add_schema(folder: Path) -> None:
    """Write the JSON schema of config.yaml beside it, and add a line with its path for editors."""
    (folder / SCHEMA).write_text(_schema_text(), encoding="utf-8")
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(f"# yaml-language-server: $schema={SCHEMA}\n{text}", encoding="utf-8")


def schema() -> None:
    """Print the JSON schema of config.yaml.

    Editors use it to complete and check keys. Example: paceline schema > config.schema.json
    """
    typer.echo(_schema_text(), nl=False)


def _schema_text() -> str:
    from paceline.config import json_schema

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _commands(folder: Path, recipe: str | None) -> list[str]:
    """The shell commands that train a new project."""
    there = f"cd {quote(str(folder))} && "
    if recipe is None:
        return [f"{there}python main.py", f"{there}paceline train config.yaml num_epochs=5"]
    about = RECIPE_CONFIGS[recipe].read_text(encoding="utf-8").partition("\n")[0]  # its end lists the shell commands
    *before, train = re.findall(r"`(paceline [^`]+)`", about)
    train = train.replace(f"train {recipe}", "train config.yaml", 1)
    return [*before, f"{there}{train} num_epochs=5"]


def get_data(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10, covtype, sst2 or tinyshakespeare.")],
    to: Annotated[Path | None, typer.Option(help="The folder; by default $PACELINE_HOME/datasets/NAME.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="FOLDER|URL", help="A folder with the files, or another mirror.")
    ] = None,
) -> None:
    """Download a data set, or copy it from a folder.

    Keeps complete files, resumes an interrupted download, and verifies checksums.
    """
    from paceline.hub import download

    folder = download.get(name, to, log=typer.echo, source=source)
    typer.echo(f"{name} is complete in {folder.resolve()}")


def get_model(
    name: Annotated[str, typer.Argument(help="The model's name on the hub, such as google-bert/bert-base-uncased.")],
    to: Annotated[Path | None, typer.Option(help="The folder; by default $PACELINE_HOME/models/NAME.")] = None,
) -> None:
    """Download a pretrained model, or resume its download.

    Keeps complete files.
    """
    from paceline import models

    folder = models.get(name, to, say=typer.echo)
    typer.echo(f"{name} is complete in {folder.resolve()}")
