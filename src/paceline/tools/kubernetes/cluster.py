"""A manifest in a cluster: created, looked up and deleted by kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.tools.kubernetes.manifests import KUBEFLOW, Manifest

KUBECTL = "kubectl"
TIMEOUT = "--request-timeout=30s"


def has_kubectl() -> bool:
    """Whether kubectl is installed here."""
    return shutil.which(KUBECTL) is not None


def check_is_free(manifests: Sequence[Manifest]) -> None:
    """Raise a ConfigError if the cluster has a job of this name: an apply would change nothing, or be refused."""
    job = manifests[-1]
    kind = f"trainjobs.{KUBEFLOW}" if job["kind"] == "TrainJob" else "jobs.batch"
    name, namespace = job["metadata"]["name"], job["metadata"].get("namespace")
    place = ["--namespace", namespace] if namespace else []
    if _kubectl("get", kind, name, *place, "--ignore-not-found", "--output=name").strip():
        raise ConfigError(
            f"the cluster has a job {name} already; choose another --run-dir, or delete it first: "
            f"{' '.join([KUBECTL, 'delete', kind, name, *place])}"
        )


def apply(path: Path) -> None:
    """Create the objects of a manifest."""
    _kubectl("apply", "--filename", str(path))


def state_of(path: Path) -> str:
    """The state of the job of a manifest, as its last condition, or by its pods."""
    found = json.loads(_kubectl("get", "--filename", str(path), "--ignore-not-found", "--output=json") or "{}")
    objects = found.get("items", [found])
    jobs = [each for each in objects if each.get("kind") in ("Job", "TrainJob")]
    if not jobs:
        return "no longer in the cluster"
    status = jobs[0].get("status", {})
    conditions = [each for each in status.get("conditions", []) if each.get("status") == "True"]
    if conditions:
        last = conditions[-1]
        return ": ".join(filter(None, (last.get("type"), last.get("message"))))
    active, ready = (status.get(key) or 0 for key in ("active", "ready"))
    return f"{active} pods, {ready} of them running" if active else "pending"


def delete(path: Path) -> None:
    """Delete the objects of a manifest; their pods get the time to save."""
    _kubectl("delete", "--filename", str(path), "--ignore-not-found", "--wait=false")


def _kubectl(*words: str) -> str:
    if not has_kubectl():
        raise ConfigError("kubectl is not installed here; use a machine from which the cluster can be reached")
    ended = subprocess.run([KUBECTL, TIMEOUT, *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = (ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}").splitlines()
        raise PacelineError(f"kubectl {words[0]}: {' '.join(line.strip() for line in lines)}")
    return ended.stdout
