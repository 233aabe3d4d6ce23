"""Writes the published schemas with which tests validate manifests: tests/support/kubernetes_schemas.json.

They are those of Kubernetes, from the strict schemas in the package `kubernetes-validate`, and of Kubeflow Trainer,
from the models in the package `kubeflow-trainer-api`; both are under the Apache License 2.0. Only what a manifest of
Paceline can refer to is kept, without descriptions. Install the two packages and run this to renew the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
from pydantic.json_schema import models_json_schema

VERSION = "1.37"
TARGET = Path(__file__).parents[1] / "tests" / "support" / "kubernetes_schemas.json"
KINDS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


def of_kubernetes() -> dict[str, Any]:
    """The definitions of Kubernetes by name."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    definitions: dict[str, Any] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return definitions


def of_kubeflow() -> dict[str, Any]:
    """The definitions of Kubeflow Trainer by name, which take no other fields than their own."""
    models = [(getattr(kubeflow, name), "validation") for name in KINDS.values() if hasattr(kubeflow, name)]
    definitions: dict[str, Any] = models_json_schema(models, by_alias=True)[1]["$defs"]
    for each in definitions.values():
        if "properties" in each:
            each["additionalProperties"] = False
    return definitions


def refer(node: Any, names: Mapping[str, str]) -> Any:
    """A schema without descriptions, titles and defaults, whose references lead to `names` in one file."""
    if isinstance(node, list):
        return [refer(each, names) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: {name: refer(each, names) for name, each in value.items()} if key == "properties" else refer(value, names)
        for key, value in node.items()
        if key not in ("description", "title", "default") and not key.startswith("x-")
    }
    if "$ref" in kept:
        name = kept["$ref"].rpartition("/")[2]
        kept["$ref"] = f"#/$defs/{names.get(name, name)}"
    return kept


def references(node: Any) -> Iterator[str]:
    """The names that a schema refers to."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rpartition("/")[2]
            else:
                yield from references(value)


def main() -> None:
    """Write the file."""
    kubernetes, trainer = of_kubernetes(), of_kubeflow()
    # IoK8sApiCoreV1Pod is io.k8s.api.core.v1.Pod, whose schema is stricter.
    same = {re.sub(r"\W", "", name).lower(): name for name in kubernetes}
    names = {name: same[name.lower()] for name in trainer if name.lower() in same}
    definitions = {**trainer, **kubernetes}
    kept, pending = dict[str, Any](), list(KINDS.values())
    while pending:
        name = pending.pop()
        if name not in kept:
            kept[name] = refer(definitions[name], names)
            pending += references(kept[name])
    packages = [f"{name} {metadata.version(name)}" for name in ("kubernetes-validate", "kubeflow-trainer-api")]
    about = f"From {' and '.join(packages)} (Apache License 2.0), by scripts/kubernetes_schemas.py."
    content = {"$comment": about, "kinds": KINDS, "$defs": dict(sorted(kept.items()))}
    TARGET.write_text(json.dumps(content, separators=(",", ":")).replace('},"io.', '},\n"io.') + "\n")
    print(f"{TARGET}: {len(kept)} definitions, {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
