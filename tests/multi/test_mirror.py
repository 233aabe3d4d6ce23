"""Runs that are mirrored to a real S3 server: killed and resumed on an empty machine, and with a store that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from faults import start, stop_step
from test_resume import stopping

from paceline.config import Config, build
from paceline.errors import ConfigError
from paceline.mirror import process
from paceline.mirror.check import check_mirror
from paceline.mirror.download import fetch_to_resume
from paceline.mirror.process import MirrorProcess
from support.configs import MANAGED
from support.mirrors import copier_of, copy_all, make_run
from support.runs import events_of, warnings_in
from support.s3 import FaultyProxy, create_bucket, s3_server

KEY, SECRET = "AKIAGEHEIM0000000000", "geheim-geheim-geheim"

SCRIPT = """
import os, sys, time
import torch
from paceline import Trainer

class Data(torch.utils.data.Dataset):
    def __init__(self): self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 5 and "GATE" in os.environ:
            with open("visits", "ab", buffering=0) as file:
                file.write(b"x")
                while file.tell() == 3 and not os.path.exists("gate"):  # in the third epoch
                    time.sleep(0.05)
        return self.x[i], (self.x[i].sum() > 0).long()

def model(): return torch.nn.Linear(4, 2)

if __name__ == "__main__":
    keys = dict(pair.split("=") for pair in sys.argv[1:])
    result = Trainer(
        model, Data, loss_fn=torch.nn.functional.cross_entropy, metrics=["accuracy"],
        optimizer={"name": "adam", "lr": 0.01},
        batch_size=4, lanes=2, num_epochs=4, procs=int(keys["procs"]), run_dir=keys.get("run_dir"),
        resume=keys.get("resume", "never"), checkpoint={"every_steps": 4, "async": False, "mirror": keys.get("mirror")},
    ).start()
    print("done", result.weights_sha256, result.optimizer_sha256)
"""


@pytest.fixture
def make_config() -> Callable[..., Config]:
    return lambda **keys: build({**MANAGED, **keys})


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy to the server, which the libraries use in this process and in others; each test has its own bucket."""
    proxy = FaultyProxy(server)
    for name, value in {
        "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "LAST_RETRY_S", 0.0)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(proxy: FaultyProxy) -> str:
    name = f"bucket-{proxy.port}"
    create_bucket(proxy.target, name)
    return name


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)


def done(ended: subprocess.CompletedProcess[str]) -> str:
    match = re.search(r"^done .*$", ended.stdout, re.MULTILINE)
    assert match, ended.stderr
    return match[0]


def test_a_killed_run_is_resumed_from_s3_on_an_empty_machine_with_the_same_hash(
    proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    Path("main.py").write_text(SCRIPT)
    whole = done(command("main.py", "procs=1", "run_dir=whole"))
    url = f"s3://{bucket}/lab"
    has_arrived = threading.Event()  # a checkpoint

    def watch(method: str, path: str) -> None:
        if method == "GET" and re.search(r"step-\d+/manifest\.json", path):  # it is read back
            has_arrived.set()

    proxy.fault = watch
    words = [sys.executable, "main.py", "procs=2", "run_dir=lost", f"mirror={url}"]
    with subprocess.Popen(words, env={**os.environ, "GATE": "1"}) as launcher:  # which waits in the third epoch
        try:
            assert has_arrived.wait(100)  # the process that copies has the lowest priority
        finally:
            launcher.kill()
    shutil.rmtree("lost", ignore_errors=True)
    resumed = command("main.py", "procs=1", f"resume={url}/run/lost", f"mirror={url}", "run_dir=again")
    assert done(resumed) == whole
    assert "downloaded step-000000" in resumed.stderr
    assert f"mirror: complete; resume on any machine with --resume {url}/run/lost" in resumed.stderr
    steps = [event["step"] for event in events_of(Path("again"), "step")]
    assert steps == sorted(set(steps))
    assert not Path("again/.fetched").exists()

    cli = ("-m", "paceline")
    report = command(*cli, "report", f"{url}/run/lost", "--out", "page.html")
    assert report.returncode == 0, report.stderr
    assert f"{url}/run/lost" in Path("page.html").read_text()
    listed = command(*cli, "checkpoints", f"{url}/run/lost")
    assert "complete" in listed.stdout, listed.stderr
    refused = command(*cli, "evaluate", f"{url}/run/lost")
    assert refused.returncode == 2
    assert f"was downloaded from {url}/run/lost, and using it executes the code below" in refused.stderr
    for path in [*Path("again").rglob("*"), *Path().glob("shared_data/**/*")]:
        if path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content, path
            assert KEY.encode() not in content, path


def test_a_store_that_is_down_does_not_delay_a_run_and_is_caught_up_with(
    proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store is down until the mirror has reported it; then the launcher waits for the copies."""
    events = Path("run/events.jsonl")
    proxy.fault = lambda *_: None if events.exists() and "is not mirrored" in events.read_text() else "refuse"
    result = start(num_epochs=1, checkpoint={"every_steps": 2, "mirror": f"s3://{bucket}/lab"})
    printed = capsys.readouterr().err
    assert "cannot be reached now" in printed
    assert f"mirror: complete; resume on any machine with --resume s3://{bucket}/lab/run/run" in printed
    [warning] = [text for text in warnings_in(result.run_dir) if "mirror" in text]
    assert "training continues, and copying is tried again" in warning
    assert "is up to date" in events_of(result.run_dir, "mirror")[-1]["text"]


def test_a_run_that_is_stopped_saves_its_newest_checkpoint_in_the_mirror(
    proxy: FaultyProxy, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = {"mirror": f"s3://{bucket}/lab"}
    step = stop_step(checkpoint=checkpoint, dataset_fn=stopping(2))
    mirrored = [event["step"] for event in events_of(Path("run"), "mirrored")]
    assert mirrored == [step]
    assert "mirror: complete" in capsys.readouterr().err


def one_fault(kind: str, pattern: str) -> Callable[[str, str], str | None]:
    """A fault in the first upload whose path matches."""
    left = [kind]

    def fault(method: str, path: str) -> str | None:
        return left.pop() if left and method == "PUT" and re.search(pattern, path) else None

    return fault


@pytest.mark.parametrize("kind", ["truncate", "expired"])
def test_faults_of_the_store_leave_no_incomplete_checkpoint_and_one_warning(
    proxy: FaultyProxy, bucket: str, kind: str, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    folder, is_over = make_run(tmp_path / "run", 3, 6), threading.Event()
    is_over.set()
    proxy.fault = one_fault(kind, r"state\.pt")
    options = {"mirror": f"s3://{bucket}/lab", "name": "lab", "keep": 3, "best": None}
    assert MirrorProcess(folder, options, is_over).run()
    assert kind in proxy.faults
    assert len(warnings_in(folder.path)) == 1
    proxy.fault = lambda method, path: "slow" if method == "GET" else None
    restored = fetch_to_resume(make_config(resume=f"s3://{bucket}/lab/lab/run"))
    assert [path.name for path in sorted(restored.glob("checkpoints/*"))] == ["step-00000006"]
    assert SECRET not in folder.events.read_text()


def test_a_truncated_object_falls_back_to_the_checkpoint_before(
    proxy: FaultyProxy,
    bucket: str,
    make_config: Callable[..., Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, place = make_run(tmp_path / "run", 3, 6), f"s3://{bucket}/lab/lab/run"
    copier = copier_of(folder, f"s3://{bucket}/lab")
    copy_all(copier)
    copier.claim.place._fs.pipe_file(f"{place}/checkpoints/step-00000006/state.pt", b"half")
    restored = fetch_to_resume(make_config(resume=place))
    assert [path.name for path in restored.glob("checkpoints/*")] == ["step-00000003"]
    assert "warning: step-00000006 in " in capsys.readouterr().err


def test_mistakes_are_found_before_a_run_starts(
    proxy: FaultyProxy, bucket: str, make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = make_config(checkpoint={"mirror": "s3://no-such-bucket/lab"})
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror=s3://no-such-bucket/lab does not exist \(The specified"):
        check_mirror(missing)
    config = make_config(checkpoint={"mirror": f"s3://{bucket}/lab"})
    proxy.fault = lambda method, path: "expired"
    with pytest.raises(ConfigError, match="cannot be written to: The provided token has expired"):
        check_mirror(config)
    proxy.fault = lambda method, path: "refuse"
    check_mirror(config)
    assert "cannot be reached now" in capsys.readouterr().err


def test_two_runs_of_one_name_have_two_places(proxy: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    places = [copier_of(make_run(tmp_path / n / "run"), f"s3://{bucket}/lab").claim.place.url for n in ("a", "b")]
    assert places == [f"s3://{bucket}/lab/lab/run", f"s3://{bucket}/lab/lab/run-2"]
