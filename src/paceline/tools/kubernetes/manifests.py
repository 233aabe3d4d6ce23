"""The manifest of a run (pure): a Service and an Indexed Job, or a TrainingRuntime and a TrainJob of Kubeflow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from paceline.tools.kubernetes.request import PodsRequest

PORT = 29400  # of the coordinator
KUBEFLOW = "trainer.kubeflow.org"
CONTAINER = "paceline"
NODE = "node"  # Kubeflow's name for the replicated job that trains, and for its container
HEADER = "# Written by `paceline submit`."
FINAL_CODES = [1, 2]  # the run has failed, or its config is wrong; after any other code a new pod resumes it
UNQUOTED = re.compile(r"(?![yYnN]\Z)[A-Za-z/][A-Za-z0-9_./-]*")

Manifest = dict[str, Any]


def indexed_job(request: PodsRequest, name: str, words: Sequence[str], workdir: str) -> list[Manifest]:
    """An Indexed Job that runs `paceline train WORDS`, with the service that gives its pods their names."""
    pod = _pod(request, CONTAINER, _command(request, words, f"{name}-0.{name}"), workdir)
    if request.nodes == 1:
        return [_object(request, name, "batch/v1", "Job", _job_spec(request, CONTAINER, pod))]
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # the pods find each other before they are ready
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    job = _job_spec(request, CONTAINER, {**pod, "subdomain": name})
    return [
        _object(request, name, "v1", "Service", service),
        _object(request, name, "batch/v1", "Job", job),
    ]


def train_job(request: PodsRequest, name: str, words: Sequence[str], workdir: str) -> list[Manifest]:
    """A TrainJob, with a runtime of its own that has the rules of the Indexed Job."""
    # Kubeflow's controller makes a JobSet of it, whose service has the name of the TrainJob.
    command = _command(request, words, f"{name}-{NODE}-0-0.{name}")
    template = {
        "metadata": {"labels": {f"{KUBEFLOW}/trainjob-ancestor-step": "trainer"}},
        "spec": _job_spec(request, NODE, _pod(request, NODE, command, workdir)),
    }
    runtime = {
        "mlPolicy": {"numNodes": request.nodes},
        "template": {
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
            }
        },
    }
    job = {
        "runtimeRef": {"apiGroup": KUBEFLOW, "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": request.nodes},
    }
    return [
        _object(request, name, f"{KUBEFLOW}/v1alpha1", "TrainingRuntime", runtime),
        _object(request, name, f"{KUBEFLOW}/v1alpha1", "TrainJob", job),
    ]


def _object(request: PodsRequest, name: str, version: str, kind: str, spec: Manifest) -> Manifest:
    metadata: Manifest = {"name": name}
    if request.namespace is not None:
        metadata["namespace"] = request.namespace
    metadata["labels"] = {"app.kubernetes.io/managed-by": "paceline"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _command(request: PodsRequest, words: Sequence[str], first_pod: str) -> list[str]:
    command = ["paceline", "train", *words]
    if request.procs is not None:
        command += ["--procs", request.procs]
    if request.nodes > 1:
        command += ["--nodes", str(request.nodes), "--rendezvous", f"{first_pod}:{PORT}"]
    return [word.replace("$", "$$") for word in command]  # Kubernetes would replace $(NAME)


def _job_spec(request: PodsRequest, container: str, pod: Manifest) -> Manifest:
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimitPerIndex": request.max_requeues,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # two pods of one index never run at the same time
        "podFailurePolicy": {
            "rules": [  # the first that applies
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": container, "operator": "In", "values": FINAL_CODES},
                },
            ]
        },
    }
    if request.time_s is not None:
        spec["activeDeadlineSeconds"] = request.time_s
    return {**spec, "template": {"spec": pod}}


def _pod(request: PodsRequest, container: str, command: list[str], workdir: str) -> Manifest:
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # for the workers of a DataLoader
    for claim in dict.fromkeys(volume.claim for volume in request.mounts):
        name = f"claim-{len(volumes)}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts += [{"name": name, "mountPath": path} for other, path in request.mounts if other == claim]
    main: Manifest = {
        "name": container, "image": request.image, "command": command, "workingDir": workdir,
        "terminationMessagePolicy": "FallbackToLogsOnError", "volumeMounts": mounts,
    }  # fmt: skip
    if request.secrets:
        main["envFrom"] = [{"secretRef": {"name": name}} for name in request.secrets]
    if resources := _resources(request):
        main["resources"] = resources
    return {
        **request.pod,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.notice_s,
        "enableServiceLinks": False,  # a service named `master` would set MASTER_PORT
        "containers": [main],
        "volumes": volumes,
    }


def _resources(request: PodsRequest) -> Manifest:
    gpus = str(request.gpus_per_node) if request.gpus_per_node else None
    amounts = {
        "requests": {"cpu": request.cpu, "memory": request.memory},
        "limits": {"memory": request.memory, "nvidia.com/gpu": gpus},
    }
    given = {kind: {name: text for name, text in each.items() if text} for kind, each in amounts.items()}
    return {kind: each for kind, each in given.items() if each}


class _ManifestDumper(yaml.SafeDumper):
    """Quotes all texts but plain words and paths: Kubernetes reads `1e3` and `y` in another way than PyYAML."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts twice."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent a text."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, None if UNQUOTED.fullmatch(text) else '"')


_ManifestDumper.add_representer(str, _ManifestDumper.represent_text)


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """The manifests as YAML documents."""
    text = yaml.dump_all(manifests, Dumper=_ManifestDumper, sort_keys=False, width=float("inf"), allow_unicode=True)
    return f"{HEADER}\n{text}"
