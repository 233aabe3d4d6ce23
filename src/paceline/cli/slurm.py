"""`paceline submit`, `status`, `watch`, `logs` and `cancel`: runs outside this terminal, as jobs of a cluster."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import kubernetes as pods
from paceline.cli.arguments import Overrides, Run, Target, find_config, find_run, newest_run
from paceline.errors import ConfigError, Interrupted
from paceline.formatting import printable

if TYPE_CHECKING:
    from paceline.config import Config

NOT_AFFECTED = "stopped watching; the run itself is not affected"


def submit(
    target: Target,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="The number of nodes, or of pods.", min=1)] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs per node or pod.")] = None,
    procs: Annotated[str | None, typer.Option(help="Processes per node or pod; by default one per GPU, or 1.")] = None,
    time: Annotated[str | None, typer.Option(help="The time limit of the job, such as 4:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition; by default the cluster's default.")] = None,
    notice: Annotated[
        int, typer.Option(help="The run saves this many seconds before its time limit or its end.")
    ] = 120,
    max_requeues: Annotated[int, typer.Option(help="The maximum number of requeues, or of new pods per node.")] = 100,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch, such as --sbatch=--account=lab.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; by default runs/NAME/DATE-TIME.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the script or manifest of the job and submit nothing.")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Train in pods of Kubernetes, one for each node, instead of Slurm.")
    ] = False,
    kubeflow: Annotated[bool, typer.Option("--kubeflow", help="The same, as a TrainJob of Kubeflow Trainer.")] = False,
    image: pods.Image = None,
    volume: pods.Volumes = None,
    workdir: pods.Workdir = None,
    cpu: pods.Cpu = None,
    memory: pods.Memory = None,
    secret: pods.Secrets = None,
    namespace: pods.Namespace = None,
    pod: pods.PodFile = None,
    out: pods.Out = None,
) -> None:
    """Submit a job of Slurm or Kubernetes that saves and resumes.

    The job saves a checkpoint before its time limit. Example: paceline submit config.yaml --nodes 2 --time 4:00:00
    """
    path = find_config(target)
    built = _built(path, overrides or [], procs)
    of_pods = {
        "image": image, "volume": volume, "workdir": workdir, "cpu": cpu, "memory": memory, "secret": secret,
        "namespace": namespace, "pod": pod, "out": out,
    }  # fmt: skip
    if kubernetes or kubeflow:
        pods.check_options({"partition": partition, "sbatch": sbatch}, kubernetes=kubernetes, kubeflow=kubeflow)
        pods.submit(
            built, target, path, overrides or [], is_kubeflow=kubeflow, wanted=run_dir or built.run_dir, out=out,
            workdir=workdir, dry_run=dry_run, pod=pod, image=image, volumes=volume or (), nodes=nodes,
            namespace=namespace, gpus_per_node=gpus_per_node, cpu=cpu, memory=memory, secrets=secret or (),
            procs=procs, time=time, notice_s=notice, max_requeues=max_requeues,
        )  # fmt: skip
        return
    if given := [name for name, value in of_pods.items() if value]:
        raise ConfigError([f"--{name} is for pods; add --kubernetes or --kubeflow, or remove it" for name in given])
    _submit_to_slurm(
        built, path, overrides or [], run_dir, dry_run=dry_run, nodes=nodes, gpus_per_node=gpus_per_node, procs=procs,
        time=time, partition=partition, notice_s=notice, max_requeues=max_requeues, options=sbatch or (),
    )  # fmt: skip


def _built(path: Path, overrides: list[str], procs: str | None) -> Config:
    from paceline import config
    from paceline.trainer import build_config

    raw = config.read_yaml(path)
    overridden = config.override(raw, overrides)
    if procs is not None:
        raw["procs"] = procs
    return build_config(raw, path.parent.resolve(), overridden)


def _submit_to_slurm(
    built: Config, path: Path, overrides: list[str], run_dir: Path | None, *, dry_run: bool, **request_values: Any
) -> None:
    from paceline.run.layout import RunFolder
    from paceline.run.lifecycle import new_folder
    from paceline.tools.submit import JobRequest, script
    from paceline.tools.submit import submit as submit_script

    request = JobRequest(**request_values)
    words = [str(path.resolve()), *overrides]
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
    """Show the progress of a run and the state of its job."""
    from paceline.tools.submit import describe

    folder = find_run(run or newest_run())
    for line in (*pods.state_lines(folder), *describe(folder)):
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
    """Cancel the job of a run; the run saves first.

    Resume the run with `paceline submit … --run-dir RUN`.
    """
    from paceline.tools.submit import cancel as cancel_job
    from paceline.tools.submit import job_of

    folder = find_run(run)
    job = job_of(folder)
    if job is None and folder.manifest.exists():
        pods.cancel(folder)
        return
    if job is None:
        raise ConfigError(f"{run} is not a Slurm job; stop it with Ctrl-C or SIGTERM where it was started")
    cancel_job(job)
    again = f"paceline submit … --run-dir {quote(str(run))}"
    typer.echo(printable(f"job {job} ends as soon as the run has saved; resume the run with {again}"))
