"""The command line: argv to commands, the only printer of final words and the only place that ends the process.

torch is imported by the commands that need it, never to show help.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.config import Config
from paceline.errors import ConfigError, Interrupted, MissingExtra, PacelineError

PACKAGE = Path(__file__).parent
RECIPES = PACKAGE / "recipes"
PROJECT_TEMPLATE = PACKAGE / "templates" / "project"
TRIALS_SHOWN = 20

Command = Callable[..., None]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The data sets that recipes use.")
app.add_typer(data, name="data")
model = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Pretrained models of the Hugging Face hub.")
app.add_typer(model, name="model")


def _recipe_name(path: Path) -> str:
    """A folder's config.yaml goes by the name of the folder, other configs in it by their own."""
    return path.parent.name if path.stem == "config" else path.stem


RECIPE_CONFIGS = dict(sorted((_recipe_name(path), path) for path in RECIPES.glob("*/*.yaml")))
CONFIG_HELP = f"A config.yaml, or a recipe: {', '.join(RECIPE_CONFIGS)}."


@app.callback()
def _paceline() -> None:
    """Train PyTorch models with Distributed Data Parallel: one run, one hash, from a laptop to a cluster."""


def _interruptible(command: Command) -> Command:
    """Ctrl-C ends a command with one line; typer would end it without a word."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        try:
            command(**arguments)
        except KeyboardInterrupt as interrupt:
            raise Interrupted("; ".join(["stopped by Ctrl-C", *map(str, interrupt.args)])) from None

    return run


@app.command()
@_interruptible
def train(
    target: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, such as optimizer.lr=3e-4."),
    ] = None,
    procs: Annotated[
        str | None, typer.Option(help="How many processes, or 1:4; one per GPU by default, else 1.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="How many hosts, or 1:4; the same command runs on each.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the hosts meet: one of them, and a free port.")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="local, torchrun, slurm or ray; found by itself.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME/DATE-TIME by default.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on with the unfinished run; never; or a run folder or checkpoint.")
    ] = None,
) -> None:
    """Train what a config describes: paceline train config.yaml batch_size=128 optimizer.lr=3e-4 --procs 4"""
    from paceline.trainer import Trainer

    built, folder = _build(
        target, overrides, procs=procs, nodes=nodes, rendezvous=rendezvous, launcher=launcher, run_dir=run_dir,
        resume=resume,
    )  # fmt: skip
    _say_done(Trainer.from_config(built, folder).start(), target)


@app.command()
@_interruptible
def submit(
    target: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each node.")] = None,
    procs: Annotated[str | None, typer.Option(help="Processes on each node; one per GPU by default, else 1.")] = None,
    time: Annotated[str | None, typer.Option(help="The time limit of the job, such as 4:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition; Slurm's default otherwise.")] = None,
    notice: Annotated[int, typer.Option(help="Seconds before the time limit at which the run saves.")] = 120,
    max_requeues: Annotated[int, typer.Option(help="How often the job may go back into the queue.")] = 100,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch, such as --sbatch=--account=lab.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME/DATE-TIME by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the script, and do nothing.")] = False,
) -> None:
    """Train as a Slurm job that saves before its time is up and comes again: --nodes 2 --time 4:00:00"""
    from paceline import config
    from paceline.run_folder import RunFolder, new_folder
    from paceline.submit import Plan, script
    from paceline.submit import submit as hand_over

    path = find_config(target)
    raw = config.read_yaml(path)
    config.override(raw, overrides or [])
    built = config.build(raw, folder=path.parent.resolve())
    plan = Plan(nodes, gpus_per_node, procs, time, partition, notice, max_requeues, sbatch or ())
    words = [str(path.resolve()), *(overrides or [])]
    wanted = run_dir or built.run_dir
    if dry_run:
        shown = wanted or Path("runs") / built.name / "DATE-TIME"
        typer.echo(script(plan, built.name, words, RunFolder(shown.resolve())), nl=False)
        return
    folder = RunFolder(new_folder(wanted, Path("runs") / built.name))
    job = hand_over(script(plan, built.name, words, folder), folder)
    typer.echo(f"submitted: job {job}, run folder {folder.path}")
    typer.echo("try next:")
    for command in ("status", "logs", "cancel"):
        typer.echo(f"  paceline {command} {folder.path}")


@app.command()
@_interruptible
def status(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Say how a run is doing, and the Slurm job that it was submitted as."""
    from paceline.submit import describe

    for line in describe(_run_folder(run)):
        typer.echo(line)


@app.command()
@_interruptible
def watch(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Show a run that was started elsewhere, as it goes on: in another terminal, on another host, as a Slurm job."""
    from paceline.telemetry.follow import show

    show(_run_folder(run))


@app.command()
@_interruptible
def logs(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    rank: Annotated[int | None, typer.Option(help="The output of one rank; of the Slurm job by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it is written, until Ctrl-C.")] = False,
) -> None:
    """Show what a run has printed."""
    import time

    from paceline.submit import find_log

    with find_log(_run_folder(run), rank).open(encoding="utf-8", errors="replace") as file:
        while True:
            typer.echo(file.read(), nl=False)
            if not follow:
                return
            time.sleep(0.5)


@app.command()
@_interruptible
def cancel(run: Annotated[Path, typer.Argument(help="The folder of a run that was submitted.")]) -> None:
    """End the Slurm job of a run, which saves first; `paceline submit … --run-dir RUN` goes on with it."""
    from paceline.submit import cancel as end_job
    from paceline.submit import job_of

    job = job_of(_run_folder(run))
    if job is None:
        raise ConfigError(f"{run} was not submitted; end it with Ctrl-C or SIGTERM where it was started")
    end_job(job)
    typer.echo(f"job {job} is told to end; the run saves first, and goes on with paceline submit … --run-dir {run}")


@app.command()
@_interruptible
def compare(
    target: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    procs: Annotated[str, typer.Option(help="Numbers of processes, such as 1,2,4.")] = "1,2",
    run_dir: Annotated[Path | None, typer.Option(help="The folder for all runs of the comparison.")] = None,
) -> None:
    """Train without DDP and on several numbers of processes, and compare time, loss and bits: --procs 1,2,4"""
    numbers = _numbers("procs", procs)
    built, home = _build(target, overrides, run_dir=run_dir)
    from paceline.compare import compare as run_comparison

    comparison = run_comparison(built, numbers, home, say=lambda text: typer.echo(text, err=True))
    names = list(comparison.rows[0].metrics)
    table = Table("run", "seconds", "samples/s", "speed-up", "efficiency", "loss", *names, "weights", box=None)
    for row in comparison.rows:
        loss = "" if row.train_loss is None else f"{row.train_loss:.6f}"
        speed = (f"{row.seconds:.2f}", f"{row.samples_per_s:,.0f}", f"{row.speed_up:.2f}", f"{row.efficiency:.0%}")
        measured = (f"{row.metrics[name]:.4f}" for name in names)
        table.add_row(row.name, *speed, loss, *measured, row.weights_sha256[:12])
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)
    typer.echo(comparison.verdict)
    typer.echo(f"see {comparison.folder}/compare.html and compare.json")


@app.command()
@_interruptible
def tune(
    target: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to search, such as optimizer.lr=log:1e-4:1e-1 or batch_size={32,64}, and keys to set.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="How many trials the study shall have in all.")] = 20,
    parallel: Annotated[int, typer.Option(help="Trials side by side; they share the GPUs, or the cores.")] = 1,
    procs: Annotated[str | None, typer.Option(help="How many processes a trial has.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="What counts: val_loss, accuracy, …; by default that of checkpoint.best, or val_loss."),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="min or max; known by itself for the metrics of Paceline.")] = None,
    study: Annotated[str | None, typer.Option(help="The study's name; the config's by default.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Where Optuna keeps the study, as a URL; study.db in the folder by default.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe, or random.")] = "tpe",
    pruner: Annotated[str, typer.Option(help="median, hyperband, or none: who ends hopeless trials early.")] = "median",
    seed: Annotated[int | None, typer.Option(help="Of the sampler; the config's by default.")] = None,
    engine: Annotated[str, typer.Option(help="Who starts the trials: optuna, here; ray, on its cluster.")] = "optuna",
    run_dir: Annotated[Path | None, typer.Option(help="The folder of the study; runs/NAME-tune by default.")] = None,
) -> None:
    """Search for good values, in many runs: paceline tune config.yaml --trials 20 optimizer.lr=log:1e-4:1e-1"""
    from paceline import config
    from paceline.tune import space

    if find_spec("optuna") is None:
        raise MissingExtra("optuna", "tune", "paceline tune")
    if engine == "ray" and find_spec("ray") is None:
        raise MissingExtra("ray", "ray", "--engine ray")
    path = find_config(target)
    searched, fixed = space.parse(words or [])
    raw = config.read_yaml(path)
    config.override(raw, fixed)
    if procs is not None:
        raw["procs"] = procs
    from paceline.tune.tune import Plan
    from paceline.tune.tune import tune as run_search

    plan = Plan(
        raw, path.parent.resolve(), searched, trials=trials, parallel=parallel, metric=metric, mode=mode, study=study,
        storage=storage, sampler=sampler, pruner=pruner, seed=seed, engine=engine, run_dir=run_dir,
    )  # fmt: skip
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("starting") if console.is_terminal else nullcontext() as status:
        found = run_search(
            plan,
            say=lambda text: console.print(text, markup=False),
            show=lambda text: status.update(escape(text)) if status is not None else None,
        )
    _show_found(found)


@app.command()
@_interruptible
def bench(
    models: Annotated[str, typer.Option(help="What to train: mnist, cifar.")] = "mnist,cifar",
    procs: Annotated[int, typer.Option(help="How many processes.")] = 1,
    scaling: Annotated[
        str, typer.Option(help="Numbers of processes for the hand-written loop and Paceline, such as 1,2,4.")
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Steps to measure; as suits the model by default.")] = None,
    rounds: Annotated[int, typer.Option(help="How often each loop has its turn; medians are shown.")] = 3,
    workers: Annotated[int, typer.Option(help="DataLoader workers of a process.")] = 0,
    only: Annotated[str, typer.Option(help="Loops by name, such as hand-written,paceline; all by default.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="A JSON file for all figures.")] = None,
) -> None:
    """Time small models in a hand-written DDP loop, in Paceline, and in other libraries that are installed."""
    from paceline.bench.bench import Plan
    from paceline.bench.bench import bench as run_bench
    from paceline.run_folder import write_json

    plan = Plan(
        models=_names(models), contenders=_names(only), procs=procs,
        scaling=_numbers("scaling", scaling) if scaling else (), steps=steps, rounds=rounds, workers=workers,
        device=device,
    )  # fmt: skip
    report = run_bench(plan, say=lambda text: typer.echo(text, err=True))
    if out is not None:
        write_json(out, report)
    _show_bench(report)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Weights = Annotated[
    str | None,
    typer.Option("--checkpoint", help="best, last or a step; by default the best if the run kept it, else the last."),
]
Data = Annotated[
    Path | None,
    typer.Option(resolve_path=True, help="A CSV or Parquet file; by default what the run held out."),
]
Procs = Annotated[int | None, typer.Option(min=1, help="How many processes; as in training by default.")]
Extra = Annotated[
    Path | None,
    typer.Option("--config", help="A config whose keys take the place of the run's, functions for instance."),
]


@app.command()
@_interruptible
def evaluate(
    run_dir: Run,
    checkpoint: Weights = None,
    data: Data = None,
    procs: Procs = None,
    config: Extra = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, and nothing else.")] = False,
) -> None:
    """Measure a trained model, alike on any number of processes: paceline evaluate runs/NAME/DATE-TIME --procs 4"""
    with redirect_stdout(sys.stderr):  # what the user's functions print
        run = _load(run_dir, checkpoint, data, procs, config)
        metrics = run.evaluate(data, procs)
    origin = {"weights": run.origin, "data": str(data or "held out by the run"), "run": str(run.run_dir)}
    if not _is_main():
        return
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # as JSON has it
        typer.echo(json.dumps({"metrics": finite, "step": run.step, **origin}))
        return
    for name, value in (*metrics.items(), *origin.items()):
        typer.echo(f"{name}: {value}")


@app.command()
@_interruptible
def predict(
    run_dir: Run,
    out: Annotated[Path, typer.Option(help="The table to write, .csv or .parquet.")],
    checkpoint: Weights = None,
    data: Data = None,
    procs: Procs = None,
    config: Extra = None,
) -> None:
    """Write what a trained model says of each sample, in order: paceline predict runs/NAME/DATE-TIME --out preds.csv"""
    from paceline import predictions

    predictions.check_file(out)
    run = _load(run_dir, checkpoint, data, procs, config)
    predicted = run.predictions(data, procs)
    if _is_main():
        predictions.write(out, predictions.columns_of(predicted, run.config.loss_fn))
        typer.echo(f"{out}: {len(predicted.outputs):,} predictions, weights: {run.origin}")


@app.command()
@_interruptible
def export(
    run_dir: Run,
    format: Annotated[str, typer.Option(help="safetensors, torch, onnx or hf.")],
    to: Annotated[Path, typer.Option(help="The folder to create.")],
    checkpoint: Weights = None,
    data: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="A CSV or Parquet file to try the model on; else the run's data."),
    ] = None,
    config: Extra = None,
) -> None:
    """Write a trained model for other programs: paceline export runs/NAME/DATE-TIME --format torch --to FOLDER"""
    from paceline.export import export as write_export
    from paceline.trained import load

    _check_data(data)
    with redirect_stdout(sys.stderr):  # what the user's functions and torch print
        run = load(run_dir, checkpoint, config)
        write_export(run, format, to, data, say=lambda text: typer.echo(f"{text} …", err=True))
    typer.echo(f"{to}: {format}, weights: {run.origin}; compared with the trained model, see {to / 'README.md'}")


@app.command()
def checkpoints(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
) -> None:
    """List the checkpoints of a run: step, size, metrics, and whether each can be used."""
    from paceline.checkpoint.store import Damaged, Store, verify
    from paceline.run_folder import RunFolder

    folder = RunFolder(run_dir)
    if not folder.config.exists():
        raise ConfigError(f"{run_dir} is not a run folder; give one such as runs/NAME/DATE-TIME")
    table = Table("checkpoint", "size", "saved", "metrics", "state", box=None)
    store = Store(folder.checkpoints)
    for path in (*store.paths(), *store.damaged_paths()):
        try:
            manifest = verify(path)
        except Damaged as reason:
            table.add_row(path.name, "", "", "", f"cannot be used: {reason}")
            continue
        saved = datetime.fromtimestamp(manifest.time).isoformat(" ", "seconds")
        facts = "  ".join(f"{name} {value:.4f}" for name, value in manifest.metrics.items() if value is not None)
        table.add_row(path.name, f"{manifest.size / 1e6:,.1f} MB", saved, facts, "valid")
    if not table.row_count:
        typer.echo(f"{run_dir} has no checkpoints")
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)


@app.command()
@_interruptible
def board(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders of them; runs by default.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The first free one from 6006 on by default; 0: any.")] = None,
) -> None:
    """Open TensorBoard on runs, for this machine alone: paceline board runs/mnist runs/tabular"""
    from paceline.telemetry.server import serve

    serve(runs or [Path("runs")], port, say=typer.echo)


@app.command()
@_interruptible
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs, to read anywhere: paceline report runs/NAME/DATE-TIME --out report.html"""
    from paceline.report.page import page_of
    from paceline.report.read import facts_of_all
    from paceline.run_folder import write_text

    page = page_of(facts_of_all([_run_folder(run).path for run in runs]))
    try:
        write_text(out, page)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; choose another file") from None
    typer.echo(f"{out}: {len(page) / 1e6:.1f} MB; open it in a browser, no network is needed")


@app.command()
@_interruptible
def doctor(
    target: Annotated[str | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    procs: Annotated[str | None, typer.Option(help="How many processes; as the config says, and 2 at most.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, and nothing else.")] = False,
) -> None:
    """Look at this machine, and rehearse one step of a config, before a long run: exit code 1 if a run would fail"""
    from paceline.doctor.doctor import examine

    path = find_config(target) if target is not None else None
    if not _is_main():
        return
    findings = []
    with redirect_stdout(sys.stderr):  # what the user's functions print
        for finding in examine(path, overrides or [], procs, say=lambda text: typer.echo(f"{text} …", err=True)):
            findings.append(finding)
            if not as_json:
                _show_finding(finding)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.state == "failure" for finding in findings):
        raise typer.Exit(1)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to create.")],
    recipe: Annotated[str | None, typer.Option(help=f"Begin with a recipe: {', '.join(RECIPE_CONFIGS)}.")] = None,
) -> None:
    """Write a project folder that runs as it is: model_fn.py, dataset_fn.py, train.py, main.py, config.yaml."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another name")
    if recipe is not None and recipe not in RECIPE_CONFIGS:
        raise ConfigError(f"--recipe {recipe} is not known; {_hint(recipe)}")
    source = RECIPE_CONFIGS[recipe].parent if recipe is not None else PROJECT_TEMPLATE
    left_out = ("__pycache__", "*.yaml") if recipe is not None else ("__pycache__",)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*left_out))
    if recipe is not None:
        shutil.copy(RECIPE_CONFIGS[recipe], folder / "config.yaml")
    typer.echo(f"{folder} is ready. Try next:")
    if recipe is None:
        typer.echo(f"  cd {folder} && python main.py")
    typer.echo(f"  cd {folder} && paceline train config.yaml num_epochs=5")


@data.command("get")
@_interruptible
def get_data(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or tinyshakespeare.")],
    to: Annotated[Path | None, typer.Option(help="The folder; $PACELINE_HOME/datasets/NAME by default.")] = None,
) -> None:
    """Download a data set, or go on with a download that was cut; what is already there is kept."""
    from paceline.datasets import download

    folder = download.get(name, to, say=typer.echo)
    typer.echo(f"{name} is complete in {folder.resolve()}")


@model.command("get")
@_interruptible
def get_model(
    name: Annotated[str, typer.Argument(help="As the hub has it, such as google-bert/bert-base-uncased.")],
    to: Annotated[Path | None, typer.Option(help="The folder; $PACELINE_HOME/models/NAME by default.")] = None,
) -> None:
    """Download a pretrained model, or go on with a download that was cut; what is already there is kept."""
    from paceline import models

    folder = models.get(name, to, say=typer.echo)
    typer.echo(f"{name} is complete in {folder.resolve()}")


def _load(run_dir: Path, checkpoint: str | None, data: Path | None, procs: int | None, config: Path | None) -> Any:
    """The run in a folder; while its functions and torch are imported here, another process does the same for ranks."""
    from paceline import launch
    from paceline.config import read_yaml
    from paceline.run_folder import RunFolder

    _check_data(data)
    written = RunFolder(run_dir).config
    if written.exists():
        raw = read_yaml(written)
        launch.prepare({"procs": procs or raw.get("procs")}, Path(raw.get("folder") or run_dir))
    from paceline.trained import load

    return load(run_dir, checkpoint, config)


def _check_data(data: Path | None) -> None:
    if data is not None and not data.is_file():
        raise ConfigError(f"--data {data} does not exist; give a CSV or Parquet file")


def _build(target: str, overrides: list[str] | None, **options: Any) -> tuple[Config, Path]:
    """The config that a command line means, and the folder it comes from."""
    from paceline import config, launch

    path = find_config(target)
    raw = config.read_yaml(path)
    config.override(raw, overrides or [])
    raw |= {key: value for key, value in options.items() if value is not None}
    folder = path.parent.resolve()
    launch.prepare(raw, folder)  # building a config imports torch, which the ranks can do meanwhile
    return config.build(raw, folder=folder), folder


def _run_folder(path: Path) -> Any:
    """A folder that holds a run, or will."""
    from paceline.run_folder import RunFolder

    folder = RunFolder(path.resolve())
    if not folder.config.exists() and not folder.slurm.exists():
        raise ConfigError(f"{path} is not a run folder; give one, such as runs/NAME/2026-01-02_10-00-00")
    return folder


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of processes in a list such as 1,2,4."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option} {text} is not a list of numbers; write for instance --{option} 1,2,4") from None
    if min(numbers) < 1:
        raise ConfigError(f"--{option} {text} must be 1 or more each")
    return numbers


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def find_config(target: str) -> Path:
    """The config file that a path or the name of a recipe means."""
    for path in (Path(target), Path(target) / "config.yaml"):
        if path.is_file():
            return path
    if target in RECIPE_CONFIGS:
        return RECIPE_CONFIGS[target]
    raise ConfigError(f"{target} is neither a file nor a recipe; {_hint(target, *map(str, Path().glob('*.yaml')))}")


def _hint(name: str, *others: str) -> str:
    """What somebody may have meant by the name of a recipe."""
    near = difflib.get_close_matches(name, [*RECIPE_CONFIGS, *others], n=1)
    return f"did you mean {near[0]}?" if near else f"recipes: {', '.join(RECIPE_CONFIGS)}"


def main() -> None:
    """The entry point: runs a command and turns its errors into a few words and an exit code."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            _print_error(problem)
        _exit(error)
    except PacelineError as error:
        _print_error(str(error))
        _exit(error)
    except BrokenPipeError:  # whoever read the output, `head` for instance, has gone; the run itself is done
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(0)


def _exit(error: PacelineError) -> NoReturn:
    sys.exit(error.exit_code)


def _print_error(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"paceline: {text}", style="red", markup=False)


def _is_main() -> bool:
    from paceline.launch.environment import is_main_process

    return is_main_process()


def _say_done(result: Any, target: str) -> None:
    if not _is_main():
        return
    facts = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    typer.echo(f"done: step {result.step}{'  ' + facts if facts else ''}  weights {result.weights_sha256[:12]}")
    typer.echo(f"run folder: {result.run_dir}")
    typer.echo("try next:")
    typer.echo(f"  paceline train {target} --procs 1 num_epochs=2     # other processes, other values")
    if result.metrics:
        typer.echo(f"  paceline evaluate {result.run_dir}")
    typer.echo("  paceline board                                     # curves, in TensorBoard")
    typer.echo("  paceline init mylab                                # a folder of your own")


def _show_found(found: Any) -> None:
    from paceline.tune.report import shown

    table = Table("trial", "state", found.goal.metric, "epochs", "seconds", *found.best.values, box=None)
    for row in found.rows[:TRIALS_SHOWN]:
        value = "" if row.value is None else f"{row.value:.6g}"
        table.add_row(
            str(row.number), row.state, value, str(row.epochs), f"{row.seconds:.1f}", *map(shown, row.values.values())
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)
    if len(found.rows) > TRIALS_SHOWN:
        typer.echo(f"and {len(found.rows) - TRIALS_SHOWN} more")
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"best: trial {found.best.number}, {found.goal.metric} {found.best.value:.6g}, {found.best.run_dir}")
    typer.echo(f"see {found.folder.path}: best.yaml, trials.csv{'' if found.notes else ', plots.html'}")
    typer.echo("try next:")
    typer.echo(f"  paceline train {found.folder.best}")
    typer.echo(f"  paceline board {found.folder.path}     # the curves of all trials, in TensorBoard")


def _show_finding(finding: Any) -> None:
    state = "FAILURE" if finding.state == "failure" else finding.state
    lines = [*finding.text.splitlines(), *([f"→ {finding.advice}"] if finding.advice else [])]
    colour = {"failure": typer.colors.RED, "warning": typer.colors.YELLOW}.get(finding.state)
    typer.secho(f"{state:8} {finding.name:14} {lines[0]}", fg=colour, file=sys.__stdout__)
    for line in lines[1:]:
        typer.secho(f"{'':23} {line}", fg=colour, file=sys.__stdout__)


def _show_bench(report: dict[str, Any]) -> None:
    where = report["machine"]
    on = where["gpu"] or f"{where['cores']} cores"
    typer.echo(f"{on}, torch {where['torch']}, Python {where['python']}; medians, rounds: {report['rounds']}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    for model in report["models"]:
        typer.echo(f"\n{model['model']}: {model['title']}, processes: {model['procs']}")
        table = Table("loop", "version", "DDP", "µs/step", "ratio", "lowest to highest, µs", box=None)
        for row in model["rows"]:
            table.add_row(row["title"], f"{row['package']} {row['version']}", *_figures(row))
        console.print(table)
        if model["scaling"]:
            typer.echo()
            table = Table("loop", "processes", "samples/s", "speed-up", "efficiency", box=None)
            for row in model["scaling"]:
                table.add_row(row["title"], str(row["procs"]), *_scaled_figures(row))
            console.print(table)


def _figures(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return ["", row["error"]]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    spread = f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"  # wider than the ratios differ: a busy machine
    return ["yes" if row["has_ddp"] else "no", f"{row['us_per_step']:,.0f}", ratio, spread]


def _scaled_figures(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["error"]]
    return [f"{row['samples_per_s']:,.0f}", f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"]
