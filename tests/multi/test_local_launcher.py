"""The local launcher: failures reported, orphans impossible, nothing reachable from outside, many runs at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT_HEAD = """
import os, signal, sys, time, warnings
import torch
from torch import nn
from torch.utils.data import Dataset
from paceline import Trainer

class Line(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.tensor([i / 64.0]), torch.tensor([i / 32.0])

def steps(model, loader, epochs=1, each=lambda batch: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch, (x, y) in enumerate(loader):
            each(batch)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

def rank(): return torch.distributed.get_rank()

def start(train, procs=2, **options):
    return Trainer(lambda: nn.Linear(1, 1), options.pop("dataset_fn", Line), train_fn=train, batch_size=4, procs=procs,
                   **options).start()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script that begins with the head above."""

    def write(body: str) -> Path:
        path = tmp_path / "main.py"
        path.write_text(SCRIPT_HEAD + textwrap.dedent(body))
        return path

    return write


def run_script(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, path], cwd=path.parent, env={**os.environ, **variables}, text=True, capture_output=True,
        timeout=90, check=False,
    )  # fmt: skip


@pytest.fixture
def background() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Starts scripts that are still running when the test looks at them, and ends what is left."""
    started = []

    def start(path: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, path], cwd=path.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Waits for something that other processes do; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"{what}: not within {within_s} s"
        time.sleep(0.05)
    return time.monotonic() - began


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every rank and DataLoader worker of the runs that were started in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        is_ours = "paceline.launch.fork_server" in " ".join(process.info["cmdline"] or []) and process.info[
            "cwd"
        ] == str(folder)
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])


def test_a_failing_rank_is_reported_with_place_error_line_and_log(script: Callable[[str], Path]) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            def each(batch):
                if rank() == 1 and batch == 3:
                    raise ValueError("the reading is broken")
            steps(model, train_loader, each=each)

        start(train)
    """)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "raise ValueError" in text)
    ended = run_script(path)
    shown = last_lines(ended.stdout + ended.stderr)
    assert ended.returncode == 1
    assert "rank 1 on " in shown
    assert os.uname().nodename in shown
    assert "epoch 1" in shown
    assert "batch 3" in shown
    assert "ValueError: the reading is broken" in shown
    assert f"{path}:{line}" in shown
    assert "Connection" not in shown
    log = Path(shown.split("full log: ")[1].split()[0])
    assert "Traceback" in log.read_text()
    assert not processes_of(path.parent)


def test_an_error_in_a_dataloader_worker_shows_the_users_line(script: Callable[[str], Path]) -> None:
    path = script("""
        class Torn(Line):
            def __getitem__(self, i):
                if i == 40:
                    raise KeyError("no such sample")
                return super().__getitem__(i)

        start(lambda model, train_loader, *rest: steps(model, train_loader), dataset_fn=Torn, workers=1, val_fraction=0)
    """)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "raise KeyError" in text)
    shown = last_lines(run_script(path).stderr)
    assert "KeyError: 'no such sample'" in shown
    assert f"{path}:{line}" in shown


def test_a_killed_rank_is_reported_in_words_and_the_others_have_ended(script: Callable[[str], Path]) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a survivor that will not listen
            def each(batch):
                if rank() == 2 and batch == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            steps(model, train_loader, each=each)

        start(train, procs=4)
    """)
    ended = run_script(path)
    shown = last_lines(ended.stderr)
    assert ended.returncode == 1
    assert "rank 2 on " in shown
    assert "SIGKILL: the process was killed; most likely the machine ran out of memory" in shown
    assert not processes_of(path.parent)


def test_the_survivors_of_a_failure_end_within_ten_seconds(script, background) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if rank() == 1:
                open("failed", "w").close()
                raise ValueError
            while True:
                time.sleep(1)

        start(train)
    """)
    background(path)
    wait_until(lambda: (path.parent / "failed").exists(), within_s=60, what="the failure")
    assert wait_until(lambda: not processes_of(path.parent), within_s=30, what="the end of the survivors") < 10


def test_killing_the_launcher_takes_every_rank_and_worker_with_it(script, background) -> None:
    path = script("""
        class Slow(Line):
            def __getitem__(self, i):
                open(f"fetched-{os.getpid()}", "w").close()
                time.sleep(0.2)
                return super().__getitem__(i)

        start(lambda model, train_loader, *rest: steps(model, train_loader, epochs=100), dataset_fn=Slow, workers=2)
    """)
    launcher = background(path)
    workers = lambda: list(path.parent.glob("fetched-*"))  # noqa: E731
    wait_until(lambda: len(workers()) >= 4, within_s=60, what="two DataLoader workers on each of two ranks")
    pids = [process.pid for process in processes_of(path.parent)] + [int(w.name.split("-")[1]) for w in workers()]
    assert len(set(pids)) == 6
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()

    def is_running(pid: int) -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    assert wait_until(lambda: not any(map(is_running, pids)), within_s=30, what="the end of all processes") < 5


def test_ctrl_c_ends_the_run_and_python_keeps_its_own_handler(script, background) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            open("training", "w").close()
            while True:
                time.sleep(0.1)

        try:
            start(train)
        except KeyboardInterrupt:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            open("interrupted", "w").close()
    """)
    process = background(path)
    wait_until(lambda: (path.parent / "training").exists(), within_s=60, what="the training")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert (path.parent / "interrupted").exists()
    assert not processes_of(path.parent)


def test_a_local_run_listens_on_loopback_only(script, background) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            steps(model, train_loader)
            open(f"ready-{rank()}", "w").close()
            while True:
                time.sleep(0.1)

        start(train)
    """)
    launcher = background(path)
    wait_until(lambda: len(list(path.parent.glob("ready-*"))) == 2, within_s=60, what="both ranks")
    family = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    assert len(family) == 4  # the launcher, the fork server, two ranks
    listening = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening  # the ranks do communicate
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_five_runs_started_at_the_same_moment_all_work(script) -> None:
    path = script("""
        print("value", start(lambda model, loader, *rest: steps(model, loader), procs=2).weights_sha256)
    """)
    runs = [
        subprocess.Popen(
            [sys.executable, path], cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(5)
    ]
    outputs = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0] * 5, [error for _, error in outputs if error][:1]
    assert len({output for output, _ in outputs}) == 1
    assert len(list((path.parent / "runs" / "run").iterdir())) == 5


def test_logs_hold_every_rank_and_the_screen_shows_rank_0_and_warnings_once(script) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            print(f"hello from rank {rank()}")
            print(f"also on stderr from rank {rank()}", file=sys.stderr)
            warnings.warn("the same everywhere")
            if rank() == 1:
                warnings.warn("only on rank 1")

        start(train)
    """)
    ended = run_script(path, PYTHONWARNINGS="default")
    assert ended.returncode == 0, ended.stderr
    assert "hello from rank 0" in ended.stdout
    assert "also on stderr from rank 0" in ended.stdout + ended.stderr
    assert "from rank 1" not in ended.stdout + ended.stderr
    assert ended.stderr.count("the same everywhere") == 1
    assert ended.stderr.count("only on rank 1") == 1
    log = next(path.parent.glob("runs/run/*/logs/rank-1.log")).read_text()
    assert "hello from rank 1" in log
    assert "also on stderr from rank 1" in log


def test_threads_are_cores_divided_by_ranks(script) -> None:
    path = script("""
        for procs in (1, 2, 4):
            print(procs, start(lambda *arguments: torch.get_num_threads(), procs=procs).value)
    """)
    cores = len(os.sched_getaffinity(0))
    ended = run_script(path)
    assert ended.stdout.split("\n")[:3] == [f"{n} {max(1, cores // n)}" for n in (1, 2, 4)], ended.stderr


def test_idle_threads_of_several_ranks_do_not_spin_unless_the_user_sets_it(
    script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    path = script("""
        print(start(lambda *arguments: os.environ.get("OMP_WAIT_POLICY"), procs=int(sys.argv[1])).value)
    """)
    for procs, variables, policy in (
        ("1", {}, "None"),
        ("2", {}, "passive"),
        ("2", {"OMP_WAIT_POLICY": "active"}, "active"),
    ):
        ended = subprocess.run(
            [sys.executable, path, procs], cwd=path.parent, env={**os.environ, **variables}, text=True,
            capture_output=True, timeout=90, check=False,
        )  # fmt: skip
        assert ended.stdout.strip() == policy, ended.stderr


def test_a_run_folder_is_not_written_over(script) -> None:
    path = script("""
        for _ in range(2):
            start(lambda *arguments: None, procs=1, run_dir="here")
    """)
    ended = run_script(path)
    assert "run_dir=here already contains a run" in last_lines(ended.stderr)
    assert (path.parent / "here" / "result.json").exists()


def test_sys_exit_inside_a_rank_is_reported_as_a_failure(script) -> None:
    path = script("""
        start(lambda *arguments: sys.exit(0))
    """)
    ended = run_script(path)
    assert ended.returncode == 1
    assert "sys.exit(0) was called during the run" in last_lines(ended.stderr)


def test_a_rank_that_ends_without_a_word_is_not_taken_for_done(script) -> None:
    path = script("""
        def train(model, train_loader, val_loader, device, num_epochs):
            def each(batch):
                if rank() == 1 and batch == 1:
                    os._exit(0)
            steps(model, train_loader, each=each)

        start(train)
    """)
    ended = run_script(path)
    shown = last_lines(ended.stderr)
    assert ended.returncode == 1
    assert "rank 1 on " in shown
    assert "ended with exit code 0 before the run was over; the code called os._exit or exec" in shown
    assert "Connection" not in shown


def test_threads_and_exit_handlers_of_the_users_libraries_run_to_their_end(script) -> None:
    path = script("""
        import atexit, threading

        def train(*arguments):
            atexit.register(lambda: open("handler", "w").close())
            threading.Thread(target=lambda: (time.sleep(1), open("thread", "w").close())).start()

        start(train, procs=1)
    """)
    assert run_script(path).returncode == 0
    assert (path.parent / "handler").exists()
    assert (path.parent / "thread").exists()
