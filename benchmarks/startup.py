"""From the command to the first step: `paceline train` and a minimal DDP script under torchrun, measured in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
import functions

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
model = DistributedDataParallel(functions.model().to(device))
optimizer = torch.optim.Adam(model.parameters())
samples = functions.samples()
for x, y in DataLoader(samples, 64, sampler=DistributedSampler(samples)):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
    break
if dist.get_rank() == 0:
    if on_gpu:
        torch.cuda.synchronize()
    print(time.time())
dist.destroy_process_group()
"""
FUNCTIONS = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

def samples():
    return torch.utils.data.TensorDataset(torch.randn(5120, 784), torch.randint(10, (5120,)))
"""
CONFIG = """
model_fn: functions:model
dataset_fn: functions:samples
loss_fn: cross_entropy
optimizer: {name: adam, lr: 1e-3}
batch_size: 64
max_steps: 1
val_fraction: 0
"""


def bare(folder: Path, procs: int, turn: int) -> float:
    """The seconds until the first step of the minimal script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}", "bare.py"]
    began = time.time()
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(ended.stdout.split()[-1]) - began


def paceline(folder: Path, procs: int, turn: int) -> float:
    """The seconds until the first step of the same run with Paceline."""
    command = [sys.executable, "-m", "paceline", "train", "config.yaml", "--procs", str(procs), "--run-dir", str(turn)]
    began = time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    events = [json.loads(line) for line in (folder / str(turn) / "events.jsonl").read_text().splitlines()]
    return next(event["time"] for event in events if event["event"] == "pace") - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.pop("PYTHONWARNINGS", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {"bare.py": BARE, "functions.py": FUNCTIONS, "config.yaml": CONFIG}.items():
            (folder / file).write_text(text)
        seconds: dict[str, list[float]] = {"bare script, torchrun": [], "paceline train": []}
        for turn in range(options.rounds):
            for way, measure in zip(seconds, (bare, paceline), strict=True):
                seconds[way].append(measure(folder, options.procs, turn))
                print(f"{way}: {seconds[way][-1]:.2f} s", file=sys.stderr)
    first = statistics.median(seconds["bare script, torchrun"])
    for way, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{way:22}  {median:5.2f} s  ratio {median / first:.2f}  ({min(measured):.2f} to {max(measured):.2f} s)")


if __name__ == "__main__":
    main()
