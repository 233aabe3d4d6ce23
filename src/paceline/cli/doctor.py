"""`paceline doctor`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import CONFIG, Overrides, find_config
from paceline.cli.output import is_main

if TYPE_CHECKING:
    from paceline.tools.doctor.checks import Finding


def doctor(
    target: Annotated[str | None, CONFIG] = None,
    overrides: Overrides = None,
    procs: Annotated[str | None, typer.Option(help="The number of processes; by default at most 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a JSON list.")] = False,
) -> None:
    """Check this machine and try one step of a config.

    The exit code is 1 if a run would fail.
    """
    from paceline import launch
    from paceline.tools.doctor.doctor import examine

    path = find_config(target) if target is not None else None
    if not is_main():
        return
    findings = []
    with redirect_stdout(sys.stderr):  # the user's functions may print
        for finding in examine(path, overrides or [], procs, _report, prepare=launch.prepare):
            findings.append(finding)
            if not as_json:
                _show(finding)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.state == "failure" for finding in findings):
        raise typer.Exit(1)


def _report(text: str) -> None:
    typer.echo(f"{text} …", err=True)


def _show(finding: Finding) -> None:
    state = "FAILURE" if finding.state == "failure" else finding.state
    lines = [*finding.text.splitlines(), *([f"→ {finding.advice}"] if finding.advice else [])]
    colour = {"failure": typer.colors.RED, "warning": typer.colors.YELLOW}.get(finding.state)
    typer.secho(f"{state:8} {finding.name:14} {lines[0]}", fg=colour, file=sys.__stdout__)
    for line in lines[1:]:
        typer.secho(f"{'':23} {line}", fg=colour, file=sys.__stdout__)
