"""`paceline submit`, `status`, `watch`, `logs` and `cancel`: runs outside this terminal, most of them Slurm jobs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from time import sleep
from typing import Annotated

import typer

from paceline.cli.arguments import Overrides, Run, Target, find_config, find_run, newest_run
from paceline.errors import ConfigError, Interrupted
from paceline.formatting import printable

NOT_AFFECTED = "stopped watching; the run itself is not affected"


def submit(
    target: Target,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="The number of nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs per node.")] = None,
    procs: Annotated[str | None, typer.Option(help="Processes per node; by default one per GPU, or 1.")] = None,
    time: Annotated[str | None, typer.Option(help="The time limit of the job, such as 4:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition; by default the cluster's default.")] = None,
    notice: Annotated[int, typer.Option(help="The run saves this many seconds before the time limit.")] = 120,
    max_requeues: Annotated[int, typer.Option(help="The maximum number of requeues.")] = 100,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch, such as --sbatch=--account=lab.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; by default runs/NAME/DATE-TIME.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the job script and submit nothing.")] = False,
) -> None:
    """Submit a Slurm job that saves and requeues itself.

    The job saves a checkpoint before its time limit. Example: paceline submit config.yaml --nodes 2 --time 4:00:00
    """
    from paceline import config
    from paceline.run.layout import RunFolder
    from paceline.run.lifecycle import new_folder
    from paceline.tools.submit import JobRequest, script
    from paceline.tools.submit import submit as submit_script
    from paceline.trainer import build_config

    path = find_config(target)
    raw = config.read_yaml(path)
    overridden = config.override(raw, overrides or [])
    built = build_config(raw, path.parent.resolve(), overridden)
    request = JobRequest(nodes, gpus_per_node, procs, time, partition, notice, max_requeues, sbatch or ())
    words = [str(path.resolve()), *(overrides or [])]
    wanted = run_dir or built.run_dir
    shown = wanted or Path("runs") / built.name / "DATE-TIME"
    text = script(request, built.name, words, RunFolder(shown.resolve()))  # raises before a folder is created
    if dry_run:
        typer.echo(text, nl=False)
        return
    folder = RunFolder(new_folder(wanted, Path("runs") / built.name))
    job = submit_script(script(request, built.name, words, folder), folder)
    typer.echo(f"submitted: job {job}, run folder {folder.path}")
    typer.echo("try next:")
    for command in ("status", "logs", "cancel"):
        typer.echo(f"  paceline {command} {quote(str(folder.path))}")


def status(run: Run = None) -> None:
    """Show the progress of a run and the state of its Slurm job."""
    from paceline.tools.submit import describe

    for line in describe(find_run(run or newest_run())):
        typer.echo(printable(line))


def watch(run: Run = None) -> None:
    """Show the live view of a run that was started elsewhere.

    The run may be in another terminal, on another host, or in a Slurm job.
    """
    from paceline.observe.screen.follower import show

    folder = find_run(run or newest_run())
    try:
        show(folder)
    except KeyboardInterrupt:
        raise Interrupted(NOT_AFFECTED) from None


def logs(
    run: Run = None,
    rank: Annotated[int | None, typer.Option(help="The output of this rank; by default that of the Slurm job.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until Ctrl-C.")] = False,
) -> None:
    """Print the output of a run."""
    from paceline.observe.screen.follower import replay
    from paceline.tools.submit import find_log

    folder = find_run(run or newest_run())
    path = find_log(folder, rank)
    if path.stat().st_size == 0:  # the managed loop itself prints nothing in the ranks
        typer.echo(f"{path} is empty: nothing has been printed yet", err=True)
        if rank is None:
            replay(folder)
    try:
        _print_file(path, follow=follow)
    except KeyboardInterrupt:
        raise Interrupted(NOT_AFFECTED) from None


def _print_file(path: Path, *, follow: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            typer.echo(printable(file.read()), nl=False)
            if not follow:
                return
            sleep(0.5)


def cancel(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a submitted run.")]) -> None:
    """Cancel the Slurm job of a run; the run saves first.

    Resume the run with `paceline submit … --run-dir RUN`.
    """
    from paceline.tools.submit import cancel as cancel_job
    from paceline.tools.submit import job_of

    job = job_of(find_run(run))
    if job is None:
        raise ConfigError(f"{run} is not a Slurm job; stop it with Ctrl-C or SIGTERM where it was started")
    cancel_job(job)
    again = f"paceline submit … --run-dir {quote(str(run))}"
    typer.echo(printable(f"job {job} ends as soon as the run has saved; resume the run with {again}"))
