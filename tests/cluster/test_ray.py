"""Real Ray, on a cluster of its own and over two hosts: the same weights as one process, whatever happens to a rank."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lab import PACELINE, Lab, outcome, rank_of, release, until

from paceline.observe.events import read

pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")

pytestmark = pytest.mark.timeout(600)  # Ray takes half a minute to begin, and longer on busy cores
HERE = Path(__file__).parent
END_S = 240
PORT = 26379


class Nodes:
    """Ray over two hosts of the lab, with capacity for one rank on each."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.head = lab, f"10.{lab.net}.0.1"
        self.folder = Path(tempfile.mkdtemp(prefix="plray"))  # short: Ray has its sockets in there
        self.variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"{self.head}:{PORT}",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        common = ["--num-cpus=1", "--num-gpus=0", "--block", "--disable-usage-stats"]
        head = [f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}", "--head"]
        for host, place in (("n1", head), ("n2", [f"--address={self.head}:{PORT}"])):
            address = f"--node-ip-address=10.{self.lab.net}.0.{host[1:]}"
            command = [PACELINE.parent / "ray", "start", address, *place, *common]
            log = self.folder / f"{host}.out"
            self.started.append(self.on(host, *command, log=log))
            self.lab.started.remove(self.started[-1])  # it stays for the next test
            until(lambda log=log: b"Ray runtime started" in log.read_bytes(), END_S)  # type: ignore[misc]

    def on(self, host: str, *command: str | Path, log: Path) -> subprocess.Popen[bytes]:
        return self.lab.on(
            host, "env", *(f"{name}={value}" for name, value in self.variables.items()), *command, log=log
        )

    def down(self) -> None:
        for process in reversed(self.started):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def ray_may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has warnings about its own code."""
    monkeypatch.delenv("PYTHONWARNINGS")


@pytest.fixture(scope="module")
def nodes(whole_lab: Lab) -> Iterator[Nodes]:
    nodes = Nodes(whole_lab)
    try:
        nodes.up()
        yield nodes
    finally:
        nodes.down()


def train(nodes: Nodes, *options: str) -> subprocess.Popen[bytes]:
    command = [PACELINE, "train", "config.yaml", "--launcher", "ray", "--procs", "2"]
    return nodes.on("n1", *command, *options, log=Path("out"))


def held_run(nodes: Nodes) -> subprocess.Popen[bytes]:
    """A run that has saved a few checkpoints and waits in the middle of an epoch."""
    Path("hold").touch()
    started = train(nodes)
    until(lambda: Path("held").exists() or started.poll() is not None, END_S)
    assert started.poll() is None, output()
    return started


def output() -> str:
    return Path("out").read_text(errors="replace")


def test_a_cluster_of_its_own_gives_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("work.py", "config.yaml"):
        shutil.copy(HERE / name, tmp_path)
    command = [PACELINE, "train", "config.yaml", "--launcher", "ray", "--procs", "2"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr
    assert outcome(Path()) == expected
    assert "2 ranks on cpu" in done.stderr
    assert not [path for path in Path("run").rglob("*") if path.name in ("job.bin", ".ray", "request")]


def test_two_nodes_give_the_weights_of_one_process_after_a_rank_was_killed(
    lab: Lab, nodes: Nodes, expected: dict[str, object]
) -> None:
    run = held_run(nodes)
    os.kill(rank_of(1), signal.SIGKILL)
    release()
    assert run.wait(END_S) == 0, output()
    assert outcome(Path()) == expected
    assert "rank 1 failed" in output()
    assert "restarting from step" in output()


def test_a_signal_to_the_launcher_saves_and_stops_the_run(lab: Lab, nodes: Nodes, expected: dict[str, object]) -> None:
    run = held_run(nodes)
    run.send_signal(signal.SIGTERM)
    until(lambda: "saving and stopping" in output())
    release()
    assert run.wait(END_S) == 3, output()
    assert "checkpoint saved" in output()
    subprocess.run([PACELINE, "train", "config.yaml", "--resume", "auto"], check=True, capture_output=True)
    assert outcome(Path()) == expected


def test_an_error_that_would_repeat_is_reported_at_once(lab: Lab, nodes: Nodes) -> None:
    with Path("work.py").open("a") as file:
        file.write("\n\ndef make_model() -> nn.Module:\n    raise ValueError('no such layer')\n")
    assert train(nodes).wait(END_S) == 1
    assert "ValueError: no such layer" in output()
    assert "restarting" not in output()
    assert list(read(Path("run/events.jsonl")))[-1]["event"] == "run_failed"


def test_ray_tune_finds_what_the_search_without_it_finds() -> None:
    for name in ("work.py", "config.yaml"):
        shutil.copy(HERE / name, Path.cwd())
    found = []
    for engine in ("optuna", "ray"):
        words = ["optimizer.lr=log:1e-3:1e-1", "num_epochs=1", "--trials", "2", "--run-dir", engine, "--engine", engine]
        subprocess.run([PACELINE, "tune", "config.yaml", *words], capture_output=True, timeout=END_S, check=True)
        rows = [line.split(",") for line in Path(engine, "trials.csv").read_text().splitlines()]
        found.append([[row[0], row[1], row[2], row[5]] for row in rows])  # not the seconds
    assert found[0] == found[1]
    assert [row[1] for row in found[0]] == ["state", "done", "done"]
    assert Path("ray/best.yaml").exists()


@pytest.mark.parametrize(
    ("gpus", "cpus", "ranks", "device", "share", "lacks"),
    [
        (0, 8, 2, "auto", {"CPU": 1.0}, False),
        (0, 8, 16, "cpu", {"CPU": 0.5}, False),
        (8, 64, 8, "auto", {"CPU": 1.0, "GPU": 1.0}, False),
        (4, 64, 8, "auto", {"CPU": 1.0, "GPU": 1.0}, True),
        (0, 64, 8, "cuda", {"CPU": 1.0, "GPU": 1.0}, True),
        (0, 0, 1, "cpu", {"CPU": 1.0}, True),
    ],
)
def test_a_rank_asks_for_a_gpu_where_there_are_any_and_for_its_part_of_the_cores(
    gpus: int, cpus: int, ranks: int, device: str, share: dict[str, float], lacks: bool
) -> None:
    from paceline.launch.ray_cluster import RayResources

    resources = RayResources(gpus, cpus, nodes=2)
    assert resources.share(ranks, device) == share
    assert resources.lacks(ranks, share) == lacks
