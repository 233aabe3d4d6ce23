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

RANKS = 4
SCRIPT = """
import json, os, signal, struct, sys

rank, (run_dir, fault) = int(os.environ["RANK"]), sys.argv[1:3]
os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")

import torch
import torch.distributed as dist
from torch import nn
from paceline import Trainer


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
    (folder / "main.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "--max-restarts=3", "main.py", folder / fault, fault], cwd=folder, capture_output=True, text=True,
        timeout=150, check=False, env={**os.environ, "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
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
