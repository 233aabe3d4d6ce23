"""The pods of a job of Kubernetes, in network namespaces: started by the command of the manifest, lost and replaced.

There is no Kubernetes here. The test does what its controllers would do: it starts the container's command with the
index of the pod, gives names to addresses, late, and replaces pods.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import PACELINE, Lab, outcome, processes_with, release, until

HERE = Path(__file__).parent
NAMES = Path("names")  # what the cluster's DNS knows


class Job:
    """The pods of a submitted job."""

    def __init__(self, lab: Lab, spec: dict[str, Any]) -> None:
        self.lab, self.spec = lab, spec
        (container,) = spec["template"]["spec"]["containers"]
        self.command = [PACELINE, *container["command"][1:]]
        self.name_of_first = "work-run-0.work-run"
        assert f"{self.name_of_first}:29400" in self.command
        NAMES.write_text("127.0.0.1 localhost\n")

    def start(self, index: int, host: str) -> subprocess.Popen[bytes]:
        """Start the pod of an index on a host; its command is process 1, as in a container."""
        return self.lab.on(
            host, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
            "env", f"JOB_COMPLETION_INDEX={index}", *self.command,
            log=Path(f"{host}.log"), name=f"work-run-{index}", table=NAMES.absolute(),
        )  # fmt: skip

    def publish(self, host: str) -> None:
        """Give the name of the first pod the address of this host; running pods see it."""
        NAMES.write_text(f"127.0.0.1 localhost\n{self.lab.address_of(host)} {self.name_of_first}\n")

    def replaces(self, code: int) -> bool:
        """Whether the rules of the job replace a pod that ends with this exit code."""
        rules = self.spec["podFailurePolicy"]["rules"]
        final = [code for rule in rules if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]]
        return code != 0 and code not in final


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What `paceline submit` writes in a folder with the work, and that folder."""
    folder = tmp_path_factory.mktemp("submitted")
    for name in ("work.py", "config.yaml"):
        shutil.copy(HERE / name, folder)
    words = ["--kubernetes", "--nodes", "2", "--procs", "1", "--image", "lab", "--volume", f"lab:{folder}", "--dry-run"]
    command = [PACELINE, "submit", "config.yaml", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout, str(folder)


@pytest.fixture
def job(lab: Lab, manifest: tuple[str, str]) -> Job:
    text, folder = manifest
    _, job = yaml.safe_load_all(text.replace(folder, str(Path.cwd())))
    return Job(lab, job["spec"])


def evict(pod: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the command of a pod."""
    (command,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    os.kill(int(command), signal.SIGTERM)


def output_of(host: str) -> str:
    return Path(f"{host}.log").read_text(errors="replace")


def test_a_first_pod_that_is_lost_is_replaced_at_another_address(job: Job, expected: dict[str, object]) -> None:
    Path("hold").touch()
    first, second = job.start(0, "n1"), job.start(1, "n2")
    until(lambda: "waiting until work-run-0.work-run:29400 is an address of this pod" in output_of("n1"))
    until(lambda: "waiting for the coordinator at work-run-0.work-run:29400" in output_of("n2"))
    job.publish("n1")
    until(Path("held").exists)

    os.killpg(first.pid, signal.SIGKILL)
    until(lambda: "no longer responds" in output_of("n2"))
    replaced = job.start(0, "n3")  # its name still has the address of the lost pod
    until(lambda: "waiting until work-run-0.work-run:29400 is an address of this pod" in output_of("n3"))
    job.publish("n3")
    release()
    assert (replaced.wait(90), second.wait(30)) == (0, 0)
    assert outcome(Path()) == expected
    assert "resuming from step" in output_of("n3")
    assert oct(Path("run/.key").stat().st_mode)[-3:] == "600"


def test_a_pod_that_is_evicted_lets_the_run_save_and_new_pods_resume_it(job: Job, expected: dict[str, object]) -> None:
    Path("hold").touch()
    job.publish("n1")
    first, second = job.start(0, "n1"), job.start(1, "n2")
    until(Path("held").exists)
    evict(second)
    release()
    codes = (first.wait(60), second.wait(30))
    assert codes == (3, 3)
    assert job.replaces(3)
    assert "checkpoint saved" in output_of("n2")

    job.publish("n2")
    first, second = job.start(0, "n2"), job.start(1, "n3")
    assert (first.wait(90), second.wait(30)) == (0, 0)
    assert outcome(Path()) == expected

    # A pod that is lost while it ends is replaced too: there is nothing to wait for any more.
    assert job.start(0, "n1").wait(60) == 0
    assert outcome(Path()) == expected


@pytest.mark.long
def test_another_pod_that_is_lost_is_replaced_while_the_first_one_waits(job: Job, expected: dict[str, object]) -> None:
    Path("hold").touch()
    job.publish("n1")
    first, second = job.start(0, "n1"), job.start(1, "n2")
    until(Path("held").exists)
    os.killpg(second.pid, signal.SIGKILL)
    until(lambda: "host work-run-1 has left" in output_of("n1"))
    release()
    replaced = job.start(1, "n3")
    assert (first.wait(90), replaced.wait(30)) == (0, 0)
    assert outcome(Path()) == expected


@pytest.mark.long
def test_a_pod_that_is_evicted_while_it_waits_is_replaced(job: Job) -> None:
    pods = [job.start(0, "n1"), job.start(1, "n2")]
    until(lambda: "waiting until" in output_of("n1") and "waiting for the coordinator" in output_of("n2"))
    for pod in pods:
        evict(pod)
    assert [pod.wait(30) for pod in pods] == [3, 3]
    assert not processes_with(str(Path.cwd()))
