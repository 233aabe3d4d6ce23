"""`paceline submit --kubernetes` and `--kubeflow`: the options that are for pods, and what the command does then."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.arguments import RECIPE_CONFIGS
from paceline.errors import ConfigError
from paceline.formatting import printable

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.run.layout import RunFolder

Image = Annotated[str | None, typer.Option(help="For pods: the container image, with Paceline in it.")]
Volumes = Annotated[
    list[str] | None,
    typer.Option(metavar="CLAIM:PATH", help="For pods: a PersistentVolumeClaim, and where to mount it."),
]
Workdir = Annotated[
    str | None, typer.Option(metavar="PATH", help="For pods: their path of the current folder; by default the same.")
]
Cpu = Annotated[str | None, typer.Option(help="For pods: cores of each one, such as 16.")]
Memory = Annotated[str | None, typer.Option(help="For pods: memory of each one, such as 64Gi.")]
Secrets = Annotated[list[str] | None, typer.Option(help="For pods: a secret whose keys become environment variables.")]
Namespace = Annotated[str | None, typer.Option(help="For pods: the namespace; by default that of kubectl.")]
PodFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="For pods: YAML with further fields, such as nodeSelector.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="For pods: write the manifest to this file and submit nothing.")
]

OF_SLURM = {
    "partition": "choose nodes by a nodeSelector in --pod FILE",
    "sbatch": "set further fields of the pods in --pod FILE",
}


def check_options(of_slurm: Mapping[str, Any], *, kubernetes: bool, kubeflow: bool) -> None:
    """Raise a ConfigError if options contradict each other."""
    problems = [f"--{name} is for Slurm; {OF_SLURM[name]}" for name, value in of_slurm.items() if value]
    if kubernetes and kubeflow:
        problems.append("--kubernetes and --kubeflow are two kinds of jobs; keep one of them")
    if problems:
        raise ConfigError(problems)


def submit(
    built: Config,
    target: str,
    path: Path,
    overrides: Sequence[str],
    *,
    is_kubeflow: bool,
    wanted: Path | None,
    out: Path | None,
    workdir: str | None,
    dry_run: bool,
    pod: Path | None,
    **request_values: Any,
) -> None:
    """Write the manifest of a run, and apply it if kubectl is here."""
    from paceline.tools.kubernetes import cluster
    from paceline.tools.kubernetes.manifests import indexed_job, to_yaml, train_job
    from paceline.tools.kubernetes.places import Places
    from paceline.tools.kubernetes.request import PodsRequest, job_name

    request = PodsRequest(**request_values, pod=_read_pod(pod))
    request.check()
    _check_config(built)
    places = Places(Path.cwd(), workdir, [volume.path for volume in request.mounts])
    places.check_workdir()
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(os.path.normpath(Path.cwd() / (wanted or Path("runs") / built.name / stem)))
    is_recipe = target in RECIPE_CONFIGS and path == RECIPE_CONFIGS[target]  # which is in the image with Paceline
    config = target if is_recipe else places.of_config(path.resolve())
    words = [config, *overrides, "--run-dir", places.of_run(folder), "--resume", "auto"]
    name = job_name(built.name, folder.name)
    manifests = (train_job if is_kubeflow else indexed_job)(request, name, words, places.there)
    text = to_yaml(manifests)
    if dry_run:
        typer.echo(text, nl=False)
        return
    can_apply = out is None and cluster.has_kubectl()
    if can_apply:
        cluster.check_is_free(manifests)
    written = _write(text, out, folder)
    if not can_apply:
        why = "" if out is not None else "kubectl is not installed here; "
        typer.echo(f"written: {written}")
        typer.echo(f"{why}submit it with: kubectl apply -f {quote(str(written))}")
        return
    cluster.apply(written)
    _show(name, folder, request.namespace, is_kubeflow=is_kubeflow)


def _check_config(built: Config) -> None:
    if built.nodes is not None or built.rendezvous is not None:
        raise ConfigError("nodes and rendezvous are set for the pods by --nodes; remove them from the config")
    if built.launcher not in ("auto", "local"):
        raise ConfigError(f"launcher={built.launcher} does not start ranks in pods; leave launcher out")


def _read_pod(path: Path | None) -> Mapping[str, Any]:
    import yaml

    if path is None:
        return {}
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--pod {path} cannot be read: {str(error).splitlines()[0]}") from None
    try:
        json.dumps(fields)
    except (TypeError, ValueError):  # a date, or an alias of a list in itself
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise ConfigError(f"--pod {path} must hold fields of a pod's spec, such as nodeSelector: {{pool: gpu}}")
    return fields


def _write(text: str, out: Path | None, folder: Path) -> Path:
    from paceline.run.atomic_files import write_text
    from paceline.run.layout import RunFolder
    from paceline.run.lifecycle import new_folder
    from paceline.tools.kubernetes.manifests import HEADER

    path = out if out is not None else RunFolder(new_folder(folder, folder.parent)).manifest
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise ConfigError(f"{path} exists and is no manifest of paceline submit; choose another file with --out")
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file with --out") from None
    return path


def _show(name: str, folder: Path, namespace: str | None, *, is_kubeflow: bool) -> None:
    place = f" -n {namespace}" if namespace else ""
    label = f"jobset.sigs.k8s.io/jobset-name={name}" if is_kubeflow else f"batch.kubernetes.io/job-name={name}"
    typer.echo(f"submitted: {'TrainJob' if is_kubeflow else 'job'} {name}, run folder {folder}")
    typer.echo("try next:")
    typer.echo(f"  kubectl get pods{place} -l {label}")
    typer.echo(f"  kubectl logs{place} -l {label} --prefix --follow")
    for command in ("status", "cancel"):
        typer.echo(f"  paceline {command} {quote(str(folder))}")


def state_lines(folder: RunFolder) -> list[str]:
    """The state of the job of a run, if it was submitted as pods and kubectl is here."""
    from paceline.tools.kubernetes import cluster

    if not folder.manifest.exists() or not cluster.has_kubectl():
        return []
    return [f"job in Kubernetes: {cluster.state_of(folder.manifest)}"]


def cancel(folder: RunFolder) -> None:
    """Delete the job of a run."""
    from paceline.tools.kubernetes import cluster

    cluster.delete(folder.manifest)
    again = f"paceline submit … --run-dir {quote(str(folder.path))}"
    typer.echo(printable(f"its pods end when the run has saved; resume it with {again}"))
