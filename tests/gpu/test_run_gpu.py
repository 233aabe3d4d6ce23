"""Own loops with `run`, and steps of the user's, on a GPU: one hash on any number of ranks, eager and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import conv_net
from torch.nn import functional

from paceline import Run, Trainer
from paceline.errors import RankFailed
from support.datasets import signed
from support.runs import warnings_in


class Images(torch.utils.data.TensorDataset):
    def __init__(self) -> None:
        super().__init__(*signed(203, 3, 8, 8).tensors)


class Spoilt(Images):
    def __init__(self) -> None:
        super().__init__()
        self.tensors[0][17] = torch.nan


def train(model, train_loader, val_loader, device, num_epochs, run: Run, fused: bool = True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=run.total_steps)
    run.track(optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            with run.autocast():
                loss = functional.cross_entropy(model(x), y)
            run.backward(loss)
            if run.step(optimizer, clip_norm=1.0):
                scheduler.step()
            run.log(doubled=2 * loss)
        model.eval()
        with torch.no_grad():
            right = torch.stack([(model(x).argmax(1) == y).sum() for x, y in val_loader]).sum()
        model.train()
        run.log(right=run.sum(right))


def train_unfused(model, train_loader, val_loader, device, num_epochs, run: Run):
    train(model, train_loader, val_loader, device, num_epochs, run, fused=False)


def start(procs: int, **changed: Any) -> Any:
    options: dict[str, Any] = {"train_fn": train, "num_epochs": 2, "dataset_fn": Images, "ema": 0.9, **changed}
    return Trainer(conv_net, batch_size=8, lanes=4, device="cuda", procs=procs, **options).start()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_own_loop_gives_one_hash_on_1_2_and_4_ranks_that_share_the_gpu(precision: str) -> None:
    results = [start(1, precision=precision, backend="nccl")]
    results += [start(procs, precision=precision, backend="gloo") for procs in (1, 2, 4)]
    assert len({(r.weights_sha256, r.ema_sha256, r.optimizer_sha256) for r in results}) == 1
    assert all(result.history == results[0].history for result in results)


def test_an_own_loop_skips_steps_that_are_not_finite_where_its_optimizer_can() -> None:
    results = [start(procs, dataset_fn=Spoilt, val_fraction=0.1, backend="gloo") for procs in (1, 2)]
    assert len({result.weights_sha256 for result in results}) == 1
    assert sum("is not finite" in text for text in warnings_in(results[0].run_dir)) == 2
    with pytest.raises(RankFailed, match="create it with fused=True"):
        start(1, dataset_fn=Spoilt, train_fn=train_unfused, backend="nccl", max_restarts=0)


NCCL = """
import json, os, sys
rank = int(os.environ["RANK"])
os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
sys.path[:0] = sys.argv[2:]
import test_run_gpu
result = test_run_gpu.start(None, backend="nccl", precision="bf16", run_dir=sys.argv[1])
if rank == 0:
    print(json.dumps({"weights": result.weights_sha256, "optimizer": result.optimizer_sha256}))
"""


def test_an_own_loop_gives_one_hash_on_several_nccl_ranks(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(NCCL)
    found = []
    for ranks in (1, 2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        ended = subprocess.run(
            [*command, "main.py", tmp_path / str(ranks), *paths], cwd=tmp_path, capture_output=True, text=True,
            timeout=200, check=False, env={**os.environ, "PYTHONWARNINGS": "default"},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-3000:]
        found.append(json.loads(ended.stdout.strip().splitlines()[-1]))
    assert found == [found[0]] * 3


def step(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    x, y = batch
    output = model(x)
    loss = functional.cross_entropy(output, y)
    return {"loss": loss, "confidence": output.detach().softmax(1).amax(1).mean()}


def test_a_step_of_the_users_is_recorded_and_gives_the_hash_of_the_eager_one() -> None:
    shared: dict[str, Any] = {"train_fn": None, "step_fn": step, "num_epochs": 8, "optimizer": {"name": "adamw"}}
    graph = start(1, step_mode="graph", backend="nccl", **shared)
    eager = start(1, step_mode="eager", backend="nccl", **shared)
    both = start(2, backend="gloo", **shared)
    assert len({(r.weights_sha256, r.ema_sha256, r.optimizer_sha256) for r in (graph, eager, both)}) == 1
    assert graph.history == eager.history == both.history
    assert not [text for text in warnings_in(graph.run_dir) if "record" in text]
