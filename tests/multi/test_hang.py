"""A run that hangs ends by itself, in a table that names the rank, its line, and what the others wait in."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

HEAD = """
import json, os, re, signal, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from paceline import Trainer

class Line(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.tensor([i / 64.0]), torch.tensor([i / 32.0])

def step(model, x, y):
    nn.functional.mse_loss(model(x), y).backward()  # backward

def start(dataset_fn=Line, **options):
    options = {"procs": 2, "hang_timeout_s": 3, "val_fraction": 0, **options}
    Trainer(lambda: nn.Linear(1, 1), dataset_fn, batch_size=4, run_dir="run", **options).start()
"""
MANAGED = "loss_fn=nn.functional.mse_loss"


@pytest.fixture
def run_script(run: Callable[..., CompletedProcess[str]], tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """Runs a script that begins with the head above, by Python or another command."""

    def run_script(body: str, *command: str) -> CompletedProcess[str]:
        (tmp_path / "main.py").write_text(HEAD + textwrap.dedent(body))
        return run(*(command or (sys.executable,)), "main.py")

    return run_script


def line_of(text: str, folder: Path) -> str:
    """`main.py:line` of the only line that ends with a comment of this text."""
    lines = (folder / "main.py").read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"main.py:{number}"


def logs_in(folder: Path) -> list[str]:
    return [(folder / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]


def assert_no_process_is_left(folder: Path) -> None:
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "cwd", "status"])
        if is_in(process, folder)
    ]
    assert left == []


def is_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process runs in a folder; this one does."""
    is_other = process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE
    return is_other and process.info["cwd"] == str(folder)


def test_a_data_set_that_blocks_on_one_rank_is_named_with_the_wait_of_the_others(run_script, tmp_path: Path) -> None:
    ended = run_script(f"""
        class Stuck(Line):
            fetched = 0
            def __getitem__(self, i):
                self.fetched += 1
                if dist.get_rank() == 1 and self.fetched > 20:
                    threading.Event().wait()  # stuck
                return super().__getitem__(i)

        start(Stuck, {MANAGED}, max_restarts=0)
    """)
    stuck = line_of("stuck", tmp_path)
    assert ended.returncode == 1
    assert f"rank 1 is in `{stuck}`; rank 0 waits for it in the gradient reduction of step " in ended.stderr
    assert re.search(rf"^  1 +\S+ +\d+ +training +{tmp_path}/{stuck}$", ended.stderr, re.M)
    assert re.search(r"^  0 +\S+ +\d+ +training +– +waits in the gradient reduction$", ended.stderr, re.M)
    assert "most recent call first" not in ended.stdout + ended.stderr
    of_rank_0, of_rank_1 = logs_in(tmp_path)
    assert "in _engine_run_backward" in of_rank_0
    assert f'main.py", line {stuck.split(":")[1]} in __getitem__' in of_rank_1
    assert_no_process_is_left(tmp_path)


def test_a_data_set_that_blocks_in_a_worker_process_is_named_by_its_line(run_script, tmp_path: Path) -> None:
    ended = run_script(f"""
        class Stuck(Line):
            def __getitem__(self, i):
                if i == 40:
                    time.sleep(10**6)  # stuck
                return super().__getitem__(i)

        start(Stuck, {MANAGED}, workers=1, max_restarts=0)
    """)
    assert ended.returncode == 1
    assert re.search(
        rf"rank \d is waiting for DataLoader workers, in `{line_of('stuck', tmp_path)}`; rank \d waits for it in ",
        ended.stderr,
    )
    assert_no_process_is_left(tmp_path)


def test_a_collective_that_only_one_rank_calls_is_named_beside_what_the_other_calls(run_script, tmp_path: Path) -> None:
    ended = run_script("""
        def train(model, loader, *rest):
            for batch, (x, y) in enumerate(loader):
                step(model, x, y)
                if dist.get_rank() == 0 and batch == 3:
                    dist.barrier()  # alone

        start(train_fn=train)
    """)
    assert ended.returncode == 1
    assert (
        f"rank 0 in barrier at {line_of('alone', tmp_path)}, rank 1 in the gradient reduction of batch 4 at "
        f"{line_of('backward', tmp_path)}; their collectives do not match"
    ) in ended.stderr
    assert_no_process_is_left(tmp_path)


def test_a_collective_of_another_size_which_gloo_aborts_is_reported_in_the_same_way(run_script, tmp_path: Path) -> None:
    ended = run_script("""
        def train(model, loader, *rest):
            for batch, (x, y) in enumerate(loader):
                step(model, x, y)
                if dist.get_rank() == 0 and batch == 3:
                    dist.all_reduce(torch.zeros(1000))  # alone

        start(train_fn=train)
    """)
    assert ended.returncode == 1
    assert (
        f"rank 0 in all_reduce at {line_of('alone', tmp_path)}, rank 1 in the gradient reduction at "
        f"{line_of('backward', tmp_path)}; their collectives do not match"
    ) in ended.stderr
    assert_no_process_is_left(tmp_path)


def test_one_batch_more_on_one_rank_is_reported_with_the_end_that_the_other_has_reached(run_script, tmp_path) -> None:
    ended = run_script("""
        def train(model, loader, *rest):
            for x, y in loader:
                step(model, x, y)
            if dist.get_rank() == 1:
                step(model, x, y)

        start(train_fn=train)
    """)
    assert ended.returncode == 1
    assert re.search(
        r"rank 0 in all_gather_object \(comparing the weights of the ranks.*\), rank 1 in the gradient reduction of "
        rf"batch 7 at {line_of('backward', tmp_path)}; their collectives do not match",
        ended.stderr,
    )


@pytest.mark.parametrize("procs", [1, 2])
def test_an_interpreter_that_does_not_respond_is_reported_with_its_line(run_script, tmp_path: Path, procs: int) -> None:
    ended = run_script(f"""
        def train(model, loader, *rest):
            for batch, (x, y) in enumerate(loader):
                if dist.get_rank() == 0 and batch == 2:
                    re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter
                step(model, x, y)

        start(train_fn=train, procs={procs})
    """)
    assert ended.returncode == 1
    line = line_of("holds the interpreter", tmp_path)
    assert f"rank 0 is stuck in `{line}` (its interpreter does not respond)" in ended.stderr
    assert "most recent call first" not in ended.stdout + ended.stderr
    if procs == 2:
        assert "; rank 1 waits for it in the gradient reduction of batch 2 at " in ended.stderr
    assert_no_process_is_left(tmp_path)


def test_a_data_set_that_blocks_while_it_is_built_is_a_hang_although_hearts_beat(run_script, tmp_path: Path) -> None:
    ended = run_script(f"""
        def make():
            if dist.get_rank() == 0:
                threading.Event().wait()  # stuck
            return Line()

        start(make, {MANAGED})
    """)
    assert ended.returncode == 1
    assert f"rank 0 is in `{line_of('stuck', tmp_path)}`; rank 1 waits for it in " in ended.stderr


def test_work_on_the_data_set_for_longer_than_the_timeout_is_no_hang(run_script) -> None:
    ended = run_script(f"""
        def make():
            while dist.get_rank() == 0 and time.process_time() < 7:
                sum(range(10_000))
            return Line()

        start(make, {MANAGED}, hang_timeout_s=2)
    """)
    assert ended.returncode == 0, ended.stderr


def test_under_torchrun_one_rank_prints_the_table_and_all_end(run_script, tmp_path: Path) -> None:
    ended = run_script(
        """
        def train(model, loader, *rest):
            for batch, (x, y) in enumerate(loader):
                if dist.get_rank() == 1 and batch == 2:
                    threading.Event().wait()  # stuck
                step(model, x, y)

        start(train_fn=train, procs=None)
        """,
        "torchrun",
        "--nproc_per_node=2",
    )
    assert ended.returncode == 1
    sentence = f"rank 1 is in `{line_of('stuck', tmp_path)}`; rank 0 waits for it in the gradient reduction of batch 2"
    assert ended.stderr.count(sentence) == 1
    assert all("most recent call first" in log for log in logs_in(tmp_path))
    assert_no_process_is_left(tmp_path)


def test_a_rank_that_is_killed_is_reported_with_its_last_step_and_line(run_script, tmp_path: Path) -> None:
    ended = run_script("""
        def train(model, loader, *rest):
            for batch, (x, y) in enumerate(loader):
                step(model, x, y)
                while dist.get_rank() == 1 and batch == 5:
                    if json.load(open("run/logs/rank-1.place.json"))["batch"] == 5:  # watched
                        os.kill(os.getpid(), signal.SIGKILL)

        start(train_fn=train, hang_timeout_s=0)
    """)
    assert ended.returncode == 1
    assert re.search(r"rank 1 on \S+ failed \(last seen training, epoch 1, step 6, batch 5\)", ended.stderr)
    assert "SIGKILL: the process was killed" in ended.stderr
    assert f"at {tmp_path}/main.py:" in ended.stderr
