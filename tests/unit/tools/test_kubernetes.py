"""The manifest of a run for Kubernetes and Kubeflow: valid by the published schemas, and refused before it is written.

The schemas say nothing about values that depend on each other; what Kubernetes checks beyond them is tested by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import support
from paceline import cli
from paceline.errors import ConfigError, PacelineError
from paceline.tools.kubernetes.manifests import Manifest, indexed_job, to_yaml, train_job
from paceline.tools.kubernetes.places import Places
from paceline.tools.kubernetes.request import LABEL, LONGEST_NAME, PodsRequest, job_name, seconds_in

SCHEMAS = json.loads((Path(support.__file__).parent / "kubernetes_schemas.json").read_text())
PLAIN = PodsRequest(image="ghcr.io/lab/train:1.2", volumes=["lab-data:/shared"])
FULL = PodsRequest(
    image="registry.lab:5000/a/b_c@sha256:" + 64 * "0", volumes=["lab-data:/shared", "sets:/data", "lab-data:/again"],
    nodes=4, namespace="lab", gpus_per_node=8, cpu="500m", memory="1.5Gi", secrets=["wandb", "s3.keys"], procs="8",
    time="1-12", notice_s=300, max_requeues=0,
    pod={"nodeSelector": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "low"},
)  # fmt: skip
ODD = ["plain", "a b", "it's", '"quoted"', "line\nbreak", "$(HOME) $$ $x", "1e3", "yes", "~", "y", "", "ключ", "a: b #"]


def problems_with(manifest: Manifest) -> list[str]:
    """What the published schema of its kind refuses."""
    schema = {"$ref": f"#/$defs/{SCHEMAS['kinds'][manifest['kind']]}", "$defs": SCHEMAS["$defs"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(manifest)]


def pods_in(manifests: list[Manifest]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The specs of the job and of its pods."""
    for manifest in manifests:
        if manifest["kind"] == "Job":
            yield manifest["spec"], manifest["spec"]["template"]["spec"]
        if manifest["kind"] == "TrainingRuntime":
            (job,) = manifest["spec"]["template"]["spec"]["replicatedJobs"]
            yield job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("request_", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("build", [indexed_job, train_job])
def test_manifests_are_valid_by_the_published_schemas(build: Any, request_: PodsRequest) -> None:
    request_.check()
    written = to_yaml(build(request_, "work-run", ["/shared/config.yaml", *ODD], "/shared"))
    manifests = [*yaml.safe_load_all(written)]
    assert {manifest["kind"]: problems_with(manifest) for manifest in manifests} == {
        manifest["kind"]: [] for manifest in manifests
    }
    ((job, pod),) = pods_in(manifests)
    assert pod["containers"][0]["command"][3 : 3 + len(ODD)] == [word.replace("$", "$$") for word in ODD]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", *2 * [request_.nodes])
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy and a backoffLimitPerIndex need it
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_schemas_refuse_what_kubernetes_does() -> None:
    service, job = indexed_job(FULL, "work-run", [], "/shared")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    service["spec"]["ports"][0]["port"] = "29400"
    runtime, train = train_job(FULL, "work-run", [], "/shared")
    del train["spec"]["runtimeRef"]["name"]
    runtime["spec"]["mlPolicy"]["numNodes"] = "2"
    assert all(map(problems_with, (service, job, runtime, train)))  # else the test above has gone blind


def test_a_job_has_the_rules_of_paceline_s_exit_codes() -> None:
    for build, container in ((indexed_job, "paceline"), (train_job, "node")):
        manifests = build(FULL, "a", [], "/")
        ((job, pod),) = pods_in(manifests)
        ignored, final = job["podFailurePolicy"]["rules"]
        assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert final["action"] == "FailJob"
        assert final["onExitCodes"] == {"containerName": container, "operator": "In", "values": [1, 2]}
        assert [each["name"] for each in pod["containers"]] == [container]
        assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"], job["podReplacementPolicy"]) == (0, 0, "Failed")
        assert job["activeDeadlineSeconds"] == 36 * 3600
        assert pod["terminationGracePeriodSeconds"] == 300
        assert pod["containers"][0]["resources"] == {
            "requests": {"cpu": "500m", "memory": "1.5Gi"}, "limits": {"memory": "1.5Gi", "nvidia.com/gpu": "8"},
        }  # fmt: skip
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": name}} for name in ("wandb", "s3.keys")]
        assert pod["nodeSelector"] == {"pool": "gpu"}


def test_pods_find_the_first_one_by_its_name() -> None:
    service, job = indexed_job(FULL, "work-run", [], "/shared")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "work-run"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-2:] == [
        "--rendezvous", "work-run-0.work-run:29400",
    ]  # fmt: skip
    runtime, train = train_job(FULL, "work-run", [], "/shared")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], replicated["replicas"], train["spec"]["trainer"]["numNodes"]) == ("node", 1, 4)
    ((_, pod),) = pods_in([runtime])
    assert pod["containers"][0]["command"][-1] == "work-run-node-0-0.work-run:29400"
    (alone,) = indexed_job(PLAIN, "work-run", [], "/shared")
    assert "--rendezvous" not in alone["spec"]["template"]["spec"]["containers"][0]["command"]


@given(st.text(), st.text())
def test_every_run_has_a_name_that_kubernetes_takes(config: str, folder: str) -> None:
    name = job_name(config, folder)
    assert LABEL.fullmatch(name)
    assert name[0].isalpha()
    assert len(f"{name}-node-0-9999-abcde") <= 63
    assert len(name) <= LONGEST_NAME


def test_a_name_shows_the_config_and_the_folder() -> None:
    assert job_name("My_Lab", "2026-01-02_10-00-00") == "my-lab-2026-01-02-10-00-00"
    assert job_name("run", "run") == "run"
    assert job_name("3d", "x") == "run-3d-x"
    long = [job_name(30 * "a" + letter, "2026-01-02_10-00-00") for letter in "xy"]
    assert long[0] != long[1]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), min_size=1))
def test_every_text_survives_yaml(texts: list[str]) -> None:
    assert [*yaml.safe_load_all(to_yaml([{"words": texts}]))] == [{"words": texts}]


def test_texts_that_kubernetes_would_read_as_numbers_or_booleans_are_quoted() -> None:
    for text in ("1e3", "0o7", "y", "N", "on", "true", "null", "~", "0x1", "1_000", ".5", "12:30:45"):
        assert re.search(rf"""(["']){re.escape(text)}\1""", to_yaml([{"word": text}]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 600), ("10:30", 630), ("4:00:00", 14_400), ("1-12", 129_600), ("1-12:30", 131_400), ("1-0:0:1", 86_401)],
)
def test_a_time_limit_is_read_as_slurm_does(text: str, seconds: int) -> None:
    assert seconds_in(text) == seconds


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"image": None}, "the pods need a container image with Paceline in it; give --image REGISTRY/NAME:TAG"),
        ({"image": ""}, "the pods need a container image with Paceline in it; give --image REGISTRY/NAME:TAG"),
        ({"image": "Lab/Train"}, "--image 'Lab/Train' is not the name of a container image"),
        ({"image": "a b"}, "--image 'a b' is not the name of a container image"),
        ({"image": "lab:1\n"}, r"--image 'lab:1\n' is not the name of a container image"),
        ({"image": "https://ghcr.io/lab"}, "is not the name of a container image"),
        ({"volumes": []}, "give --volume CLAIM:PATH"),
        ({"volumes": ["lab"]}, "--volume 'lab' must be CLAIM:PATH with an absolute path"),
        ({"volumes": ["lab:shared"]}, "--volume 'lab:shared' must be CLAIM:PATH with an absolute path"),
        ({"volumes": ["Lab:/shared"]}, "--volume 'Lab:/shared' must be CLAIM:PATH"),
        ({"volumes": ["lab:/a/../b"]}, "--volume 'lab:/a/../b' must be CLAIM:PATH"),
        ({"volumes": ["lab:/"]}, "--volume 'lab:/' must be CLAIM:PATH"),
        ({"volumes": ["lab:/dev/shm"]}, "--volume 'lab:/dev/shm' would hide /dev/shm of the system"),
        ({"volumes": ["a:/x", "b:/x"]}, "--volume 'a:/x' is mounted where another volume is"),
        ({"namespace": "My Lab"}, "--namespace 'My Lab' must consist of at most 63 of a-z, 0-9 and -"),
        ({"namespace": 64 * "a"}, "must consist of at most 63"),
        ({"secrets": ["a_b"]}, "--secret 'a_b' must consist of a-z, 0-9, - and ."),
        ({"cpu": "4Gi"}, "--cpu '4Gi' is not a number of cores; write, for example, 8, 0.5 or 500m"),
        ({"cpu": "0"}, "--cpu '0' is not a number of cores"),
        ({"memory": "64GB"}, "--memory '64GB' is not an amount of memory of 1Mi or more; write, for example, 64Gi"),
        ({"memory": "64"}, "--memory '64' is not an amount of memory"),
        ({"memory": "64m"}, "--memory '64m' is not an amount of memory"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1 must be a number from 0 to"),
        ({"notice_s": 0}, "--notice 0 must be a number from 1 to"),
        ({"max_requeues": -1}, "--max-requeues -1 must be a number from 0 to"),
        ({"time": "4h"}, "--time '4h' is not a time limit; write MINUTES, H:MM:SS or DAYS-HOURS, such as 4:00:00"),
        ({"time": "0"}, "--time '0' is not a time limit"),
        ({"pod": {"containers": [], "volumes": []}}, "--pod sets containers, volumes, which the manifest sets itself"),
    ],
)
def test_a_wrong_value_is_answered_in_one_sentence(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        PodsRequest(**{**FULL.__dict__, **changes}).check()
    assert "\n" not in caught.value.problems[0]


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PodsRequest(image=None, cpu="many", memory="much").check()
    assert len(caught.value.problems) == 4


# --- files in the pods ----------------------------------------------------------------------------------------------


def test_the_current_folder_corresponds_to_the_working_folder_of_the_pods() -> None:
    same = Places(Path("/shared/lab"), None, ["/shared"])
    assert same.of_config(Path("config.yaml")) == "/shared/lab/config.yaml"
    assert same.of_run(Path("/shared/runs/1")) == "/shared/runs/1"
    mapped = Places(Path("/home/me/lab"), "/workspace", ["/shared"])
    assert mapped.of_config(Path("/home/me/lab/sub/config.yaml")) == "/workspace/sub/config.yaml"
    with pytest.raises(ConfigError, match=r"the run folder /workspace/runs/1 is in no volume of the pods \(/shared\)"):
        mapped.of_run(Path("runs/1"))
    with pytest.raises(ConfigError, match=r"/home/me/config\.yaml is in no volume of the pods \(/shared\)"):
        mapped.of_config(Path("/home/me/config.yaml"))
    with pytest.raises(ConfigError, match=r"/shared2/config\.yaml is in no volume"):
        same.of_config(Path("/shared2/config.yaml"))
    for text in ("lab", "/a/../b", "/a\nb"):
        with pytest.raises(ConfigError, match="must be an absolute path in the pods"):
            Places(Path("/"), text, []).check_workdir()


# --- the command ----------------------------------------------------------------------------------------------------

KUBECTL = """#!/bin/sh
echo "$@" >> kubectl.log
case "$*" in
    *" get --filename "*) cat status.json;;
    *" get "*) [ ! -e taken ] || echo job.batch/lab;;
    *" apply "*) [ ! -e refused ] || { echo one >&2; echo 'error: forbidden' >&2; exit 1; };;
esac
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stand-in for kubectl, which notes its arguments."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


def submit(*words: str, kind: str = "--kubernetes") -> None:
    given = ["submit", "digits", kind, "--image", "lab", "--volume", f"lab:{Path.cwd()}", *words]
    cli.app(given, standalone_mode=False)


def called() -> list[str]:
    path = Path("kubectl.log")
    return path.read_text().splitlines() if path.exists() else []


def test_a_job_is_applied_once_shown_and_cancelled(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit("--run-dir", "runs/my run", "--nodes", "2", "--namespace", "team", "optimizer.lr=0.1")
    manifest = lab / "runs/my run/kubernetes.yaml"
    name = "digits-my-run"
    assert called() == [
        f"--request-timeout=30s get jobs.batch {name} --namespace team --ignore-not-found --output=name",
        f"--request-timeout=30s apply --filename {manifest}",
    ]
    service, job = yaml.safe_load_all(manifest.read_text())
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][2:7] == [
        "digits", "optimizer.lr=0.1", "--run-dir", f"{lab}/runs/my run", "--resume",
    ]  # fmt: skip
    assert f"submitted: job {name}, run folder {lab}/runs/my run" in capsys.readouterr().out

    (lab / "taken").touch()
    with pytest.raises(ConfigError, match=f"the cluster has a job {name} already; .* kubectl delete jobs.batch {name}"):
        submit("--run-dir", "runs/my run")
    assert not any(" apply " in line for line in called()[2:])

    job = {"kind": "Job", "status": {"active": 2, "ready": 1}}
    failed = {"conditions": [{"type": "Failed", "status": "True", "message": "pod 0 has exit code 2"}]}
    for found, state in (
        ({"items": [{"kind": "Service"}, job]}, "2 pods, 1 of them running"),
        ({**job, "status": {}}, "pending"),
        ({"kind": "TrainJob", "status": failed}, "Failed: pod 0 has exit code 2"),
        ({}, "no longer in the cluster"),
    ):
        (lab / "status.json").write_text(json.dumps(found))
        cli.app(["status", "runs/my run"], standalone_mode=False)
        assert capsys.readouterr().out == f"job in Kubernetes: {state}\nthe run has not started yet\n"
    cli.app(["cancel", "runs/my run"], standalone_mode=False)
    assert called()[-1] == f"--request-timeout=30s delete --filename {manifest} --ignore-not-found --wait=false"
    assert "its pods end when the run has saved" in capsys.readouterr().out


def test_a_manifest_can_be_shown_or_written_without_a_cluster(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("--dry-run", kind="--kubeflow")
    assert [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)] == ["TrainingRuntime", "TrainJob"]
    submit("--out", "job.yaml")
    submit("--out", "job.yaml", "--nodes", "2")
    (lab / "config.yaml").write_text("name: lab\n")
    with pytest.raises(ConfigError, match=r"config\.yaml exists and is no manifest of paceline submit; choose another"):
        submit("--out", "config.yaml")
    assert "submit it with: kubectl apply -f job.yaml" in capsys.readouterr().out
    assert called() == []
    assert not (lab / "runs").exists()
    monkeypatch.setenv("PATH", str(lab / "nothing"))
    submit("--run-dir", "runs/x")
    assert "kubectl is not installed here; submit it with: kubectl apply -f" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="kubectl is not installed here; use a machine"):
        cli.app(["cancel", "runs/x"], standalone_mode=False)


@pytest.mark.usefixtures("lab")
def test_what_kubectl_refuses_is_reported_in_one_line() -> None:
    Path("refused").touch()
    with pytest.raises(PacelineError, match=r"^kubectl apply: one error: forbidden$"):
        submit()


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--partition", "gpu"], "--partition is for Slurm; choose nodes by a nodeSelector in --pod FILE"),
        (["--sbatch=--account=lab"], "--sbatch is for Slurm; set further fields of the pods in --pod FILE"),
        (["--kubeflow"], "--kubernetes and --kubeflow are two kinds of jobs; keep one of them"),
        (["--pod", "missing.yaml"], "--pod missing.yaml cannot be read: "),
        (["--pod", "list.yaml"], "--pod list.yaml must hold fields of a pod's spec, such as nodeSelector: {pool: gpu}"),
        (["--pod", "date.yaml"], "--pod date.yaml must hold fields of a pod's spec"),
        (["--pod", "endless.yaml"], "--pod endless.yaml must hold fields of a pod's spec"),
        (["--procs", "many"], "procs='many'"),
        (["--run-dir", "/elsewhere/1"], "the run folder /elsewhere/1 is in no volume of the pods"),
        (["--run-dir", f"{100 * '../'}x"], "the run folder /x is in no volume of the pods"),
        (["launcher=ray"], "launcher=ray does not start ranks in pods; leave launcher out"),
        (["nodes=2", "rendezvous=n1:29400"], "nodes and rendezvous are set for the pods by --nodes"),
    ],
)
def test_what_does_not_fit_pods_is_answered_in_one_sentence(words: list[str], problem: str) -> None:
    Path("list.yaml").write_text("[1]")
    Path("date.yaml").write_text("a: 2026-01-02")
    Path("endless.yaml").write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        submit(*words)
    assert all("\n" not in line for line in caught.value.problems)
    assert called() == []


def test_options_of_pods_are_not_for_slurm() -> None:
    with pytest.raises(ConfigError) as caught:
        cli.app(["submit", "digits", "--image", "lab", "--memory", "4Gi", "--dry-run"], standalone_mode=False)
    assert caught.value.problems == [
        f"--{name} is for pods; add --kubernetes or --kubeflow, or remove it" for name in ("image", "memory")
    ]
