"""Several NCCL ranks on one GPU, started by torchrun: each claims to be a host of its own, which NCCL accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.nccl import torchrun

RANKS = 4
SCRIPT = """
import json, os, signal, struct, sys
import torch
import torch.distributed as dist
from torch import nn
from paceline import Trainer

rank, (run_dir, fault) = int(os.environ["RANK"]), sys.argv[1:3]


def ask_for_dumps():
    # What NCCL's watchdog of a surviving rank may leave in the store of torchrun, which outlives the attempt.
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set("exception_dump", struct.pack("i", rank))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if rank == 2 and self.calls == 50 and not os.path.exists(run_dir + ".fault"):
            open(run_dir + ".fault", "w").close()
            if fault == "kill":
                ask_for_dumps()
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise RuntimeError("a fault of the model")
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return self.layers(x)


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(203, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


result = Trainer(
    Net, dataset, loss_fn="cross_entropy", optimizer={"name": "adamw", "lr": 3e-3}, batch_size=8, lanes=4,
    num_epochs=30, run_dir=run_dir, step_mode="eager", checkpoint={"every_steps": 20}, hang_timeout_s=5, resume="auto",
).start()
if rank == 0:
    with open(run_dir + ".json", "w") as out:
        json.dump({"weights": result.weights_sha256, "optimizer": result.optimizer_sha256}, out)
"""


def train(folder: Path, fault: str) -> dict[str, Any]:
    """Train under torchrun while rank 2 suffers a fault once; the hashes, and the seconds until all had exited."""
    began = time.monotonic()
    torchrun(folder, SCRIPT, RANKS, folder / fault, fault, max_restarts=3)
    events = (folder / fault / "events.jsonl").read_text()
    hashes = json.loads((folder / f"{fault}.json").read_text())
    return {**hashes, "attempts": events.count('"run_started"'), "seconds": time.monotonic() - began}


@pytest.mark.parametrize("fault", ["kill", "raise", "stop"])
def test_a_restart_after_a_fault_gives_the_undisturbed_hash_and_exits(tmp_path: Path, fault: str) -> None:
    undisturbed, disturbed = train(tmp_path, "none"), train(tmp_path, fault)
    print(fault, undisturbed, disturbed)
    assert (undisturbed["attempts"], disturbed["attempts"]) == (1, 2)
    assert disturbed["weights"] == undisturbed["weights"]
    assert disturbed["optimizer"] == undisturbed["optimizer"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


RESIZED = """
import json, os, sys
import torch
from torch import nn
from paceline import Callback, Trainer

out, run_dir, stop_at, slow_rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x):
        if int(os.environ["RANK"]) == slow_rank and x.is_cuda:
            torch.cuda._sleep(200_000_000)  # clock cycles: about a tenth of a second
        return self.layers(x)


class StopAt(Callback):
    def on_step(self, run, metrics):
        if run.step_number == stop_at:
            run.stop("resize")


def dataset():
    x = torch.randn(203, 16, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


try:
    result = Trainer(
        Net, dataset, loss_fn="cross_entropy", optimizer={"name": "adamw", "lr": 3e-3}, batch_size=8, lanes=4,
        num_epochs=12, run_dir=run_dir, resume="auto", callbacks=[StopAt()], log={"every_steps": 5},
    ).start()
except SystemExit as stopped:
    raise SystemExit(0 if stopped.code == 3 else stopped.code)  # 3: it can be resumed
if os.environ["RANK"] == "0":
    with open(out, "w") as file:
        json.dump({"weights": result.weights_sha256, "optimizer": result.optimizer_sha256}, file)
"""


def test_a_run_that_goes_on_with_other_numbers_of_ranks_has_the_hash_of_one_rank(tmp_path: Path) -> None:
    alone, resized = tmp_path / "alone.json", tmp_path / "resized.json"
    torchrun(tmp_path, RESIZED, 1, alone, tmp_path / "alone", 0, -1)
    for ranks, stop_at in ((4, 20), (2, 40), (3, 0)):
        torchrun(tmp_path, RESIZED, ranks, resized, tmp_path / "resized", stop_at, -1)
    assert json.loads(resized.read_text()) == json.loads(alone.read_text())
    events = [json.loads(line) for line in (tmp_path / "resized" / "events.jsonl").read_text().splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "run_started"] == [4, 2, 3]


def test_a_slow_rank_is_named_by_the_clock_of_the_device(tmp_path: Path) -> None:
    torchrun(tmp_path, RESIZED, 3, tmp_path / "slow.json", tmp_path / "slow", 0, 1)
    events = [json.loads(line) for line in (tmp_path / "slow" / "events.jsonl").read_text().splitlines()]
    [late] = [event for event in events if event["event"] == "straggler"]
    assert (late["rank"], late["phase"]) == (1, "forward")


LOCAL = """
import json, sys
import torch
from torch import nn
from paceline import Trainer


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def dataset():
    x = torch.randn(203, 16, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


for procs in (1, 3):
    result = Trainer(
        model, dataset, loss_fn="cross_entropy", optimizer="adamw", batch_size=8, lanes=4, num_epochs=3, procs=procs
    ).start()
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    [started] = [event for event in events if event["event"] == "run_started"]
    print(json.dumps([started["backend"], result.weights_sha256]))
"""


def test_local_ranks_that_share_a_gpu_can_use_nccl(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(LOCAL)
    ended = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PACELINE_NCCL_ON_SHARED_GPU": "1", "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    alone, together = (json.loads(line) for line in ended.stdout.splitlines() if line[:2] == '["')
    assert alone[0] == together[0] == "nccl"
    assert together == alone
