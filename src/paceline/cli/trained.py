"""`paceline evaluate`, `predict`, `export` and `checkpoints`: commands that use a trained run from its folder."""

from __future__ import annotations

import json
import math
import sys
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli.arguments import folder_of
from paceline.cli.output import is_main, show_table
from paceline.errors import ConfigError
from paceline.formatting import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.checkpoint.store import Manifest
    from paceline.run.layout import RunFolder

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the URL of a mirrored run.")]
Weights = Annotated[
    str | None,
    typer.Option("--checkpoint", help="best, last or a step; by default the best if the run has one, else the last."),
]
Data = Annotated[
    Path | None,
    typer.Option(resolve_path=True, help="A CSV or Parquet file; by default the run's validation data."),
]
Procs = Annotated[int | None, typer.Option(min=1, help="The number of processes; by default that of training.")]
Extra = Annotated[
    Path | None,
    typer.Option("--config", help="A config whose keys override those of the run, such as its functions."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Execute the code of a run that another user trained or that was moved.")
]


def evaluate(
    run_dir: Run,
    checkpoint: Weights = None,
    data: Data = None,
    procs: Procs = None,
    config: Extra = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a JSON object.")] = False,
) -> None:
    """Measure the loss and metrics of a trained model.

    The values are the same for any number of processes. Example: paceline evaluate runs/NAME/DATE-TIME --procs 4
    """
    with redirect_stdout(sys.stderr):  # the user's functions may print
        run = _load(folder_of(run_dir), checkpoint, data, procs, config, trust=trust)
        metrics = run.evaluate(data, procs)
    origin = {"weights": run.origin, "data": str(data or "held out by the run"), "run": str(run.run_dir)}
    if not is_main():
        return
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        typer.echo(json.dumps({"metrics": finite, "step": run.step, **origin}))
        return
    for name, value in (*metrics.items(), *origin.items()):
        typer.echo(f"{name}: {value}")


def predict(
    run_dir: Run,
    out: Annotated[Path, typer.Option(help="The file to write, .csv or .parquet.")],
    checkpoint: Weights = None,
    data: Data = None,
    procs: Procs = None,
    config: Extra = None,
    trust: Trust = False,
) -> None:
    """Write a table with a prediction for each sample.

    The rows have the order of the data set. Example: paceline predict runs/NAME/DATE-TIME --out preds.csv
    """
    from paceline.results import tables

    tables.check_file(out)
    run = _load(folder_of(run_dir), checkpoint, data, procs, config, trust=trust)
    predicted = run.predictions(data, procs)
    if is_main():
        classes = run.config.dataset_args.get("classes")
        tables.write(out, tables.columns_of(predicted, run.config.loss_fn, classes))
        typer.echo(f"{out}: {len(predicted.outputs):,} predictions, weights: {run.origin}")


def export(
    run_dir: Run,
    format: Annotated[str, typer.Option(help="safetensors, torch, onnx or hf.")],
    to: Annotated[Path, typer.Option(help="The folder to create.")],
    checkpoint: Weights = None,
    data: Annotated[
        Path | None,
        typer.Option(
            resolve_path=True, help="A CSV or Parquet file to check the export on; by default the run's data."
        ),
    ] = None,
    config: Extra = None,
    trust: Trust = False,
) -> None:
    """Export a trained model for other programs.

    Example: paceline export runs/NAME/DATE-TIME --format torch --to FOLDER
    """
    from paceline.results.load import load
    from paceline.tools.export.export import export as write_export

    _check_data(data)
    with redirect_stdout(sys.stderr):  # the user's functions and torch may print
        path = folder_of(run_dir)
        _check_trust(path, config, trust=trust)
        run = load(path, checkpoint, config, trust=True)
        write_export(run, format, to, data, on_progress=lambda text: typer.echo(f"{text} …", err=True))
    typer.echo(f"{to}: {format}, weights: {run.origin}; {to / 'README.md'} describes how it was verified")


def checkpoints(run_dir: Run) -> None:
    """List the checkpoints of a run.

    Shows the step, size and metrics of each checkpoint, and whether it can be used: files are compared with their
    checksums, those of a mirror with their sizes.
    """
    from paceline.checkpoint.store import DamagedCheckpoint, Store
    from paceline.formatting import size_text
    from paceline.run.layout import RunFolder

    folder = RunFolder(folder_of(run_dir))
    if not folder.config.exists():
        raise ConfigError(f"{run_dir} is not a run folder; give one, such as runs/NAME/DATE-TIME")
    table = Table("checkpoint", "size", "saved", "metrics", "state", box=None)
    store, measured, verify, valid = Store(folder.checkpoints), _measured_in(folder), *_verification(folder)
    for path in (*store.paths(), *store.damaged_paths()):
        try:
            manifest = verify(path)
        except DamagedCheckpoint as reason:
            table.add_row(Text(printable(path.name)), "", "", "", Text(printable(f"cannot be used: {reason}")))
            continue
        saved = datetime.fromtimestamp(manifest.time).isoformat(" ", "seconds")
        metrics = manifest.metrics or measured.get(manifest.step, {})
        facts = printable("  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if value is not None))
        measured_text = Text(facts or "not evaluated at this step")
        table.add_row(Text(printable(path.name)), size_text(manifest.size), saved, measured_text, valid)
    if not table.row_count:
        typer.echo(printable(f"{run_dir} has no checkpoints"))
        return
    show_table(table)


def _verification(folder: RunFolder) -> tuple[Callable[[Path], Manifest], str]:
    """The function that reads the manifest of a checkpoint and checks its files, and a word for those that pass."""
    from paceline.checkpoint.store import read_manifest, verify

    if not folder.fetched.exists():
        return verify, "valid"
    from paceline.mirror.reading import sizes_in
    from paceline.mirror.transfer import check_sizes

    sizes = sizes_in(folder)

    def compare(path: Path) -> Manifest:
        manifest = read_manifest(path)
        check_sizes(manifest, sizes)
        return manifest

    return compare, "complete"


def _measured_in(folder: RunFolder) -> dict[int, dict[str, float]]:
    """The metrics at each step that ended an epoch, for checkpoints that were saved before the evaluation."""
    from paceline.observe.events import read

    epochs = (event for event in read(folder.events) if event["event"] == "epoch") if folder.events.exists() else ()
    return {
        row["step"]: {name: value for name, value in row.items() if isinstance(value, float) and name != "time"}
        for row in epochs
    }


def _load(
    run_dir: Path, checkpoint: str | None, data: Path | None, procs: int | None, config: Path | None, *, trust: bool
) -> Any:
    """Load the run in a folder. While this process imports torch and the functions, another imports them for ranks."""
    from paceline import launch
    from paceline.config import read_yaml
    from paceline.run.layout import RunFolder

    _check_data(data)
    _check_trust(run_dir, config, trust=trust)
    written = RunFolder(run_dir).config
    if written.exists():
        raw = read_yaml(written)
        launch.prepare({"procs": procs or raw.get("procs")}, Path(str(raw.get("folder") or run_dir)))
    from paceline.results.load import load

    return load(run_dir, checkpoint, config, trust=True)


def _check_trust(run_dir: Path, config: Path | None, *, trust: bool) -> None:
    """Raise a ConfigError with the command to repeat if the run is not trusted, before any of its code is executed."""
    from paceline.config import read_yaml
    from paceline.results.trust import check
    from paceline.run.layout import RunFolder

    folder = RunFolder(run_dir.resolve())
    if not trust and folder.config.exists():
        replaced = read_yaml(config) if config is not None else ()
        check(folder, read_yaml(folder.config), replaced, f"run: {join(['paceline', *sys.argv[1:], '--trust'])}")


def _check_data(data: Path | None) -> None:
    if data is not None and not data.is_file():
        raise ConfigError(f"--data {data} does not exist; give a CSV or Parquet file")
