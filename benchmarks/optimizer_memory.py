"""What `shard_optimizer` saves and costs: the optimizer state on each rank, bytes sent, times of a step and of a save.

    python benchmarks/optimizer_memory.py [--ranks 1 2 4] [--layers 12] [--steps 12] [--turns 3]

A stack of square layers with AdamW on the CPU. Runs with and without sharding alternate; all must have the same hash.
The bytes are those of the loopback interface. Where other processes use it, give the benchmark one of its own (Linux):

    unshare -rn bash -c 'ip link set lo up && python benchmarks/optimizer_memory.py'
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline import Trainer

WIDTH, LANES, BATCH, WARM_UP = 2048, 4, 8, 3


def make_model(layers: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)])


def make_dataset(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*torch.randn(2, steps * LANES * BATCH, WIDTH, generator=generator))


def sent_by_all() -> int:
    """The bytes that all processes have sent over loopback."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(counter.bytes_sent for name, counter in counters.items() if name.startswith("lo"))


def make_optimizer(model: nn.Module, out: Path, steps: int) -> torch.optim.Optimizer:
    """AdamW that writes the bytes of its state and the times and bytes of its steps to a file for each rank."""
    optimizer, began, sent = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), list[float](), list[int]()

    def note(*arguments: Any) -> None:
        began.append(time.perf_counter())
        sent.append(sent_by_all())
        if len(began) == steps:
            held = sum(value.nbytes for kept in optimizer.state.values() for value in kept.values())
            times = [later - earlier for earlier, later in zip(began[WARM_UP:], began[WARM_UP + 1 :], strict=False)]
            sent_per_step = (sent[-1] - sent[WARM_UP]) / (len(times) * dist.get_world_size())
            noted = {"bytes": held, "times": times, "sent": sent_per_step}
            (out / f"{dist.get_rank()}.json").write_text(json.dumps(noted))

    optimizer.register_step_post_hook(note)
    return optimizer


def measure(procs: int, sharded: bool, layers: int, steps: int, folder: Path) -> tuple[list[int], list[float], str]:
    """The bytes on each rank; the figures of a step and a save; the weights' hash.

    The figures: the seconds of a step (median), of a save's block and of the save; the bytes a rank sends in a step.
    """
    trainer = Trainer(
        model_fn=partial(make_model, layers), dataset_fn=partial(make_dataset, steps), val_fraction=0,
        loss_fn=functional.mse_loss, optimizer_fn=partial(make_optimizer, out=folder, steps=steps), batch_size=BATCH,
        lanes=LANES, procs=procs, shard_optimizer=sharded, device="cpu", threads=1, run_dir=folder / "run",
        log={"every_steps": steps, "tensorboard": False},
    )  # fmt: skip
    result = trainer.start()  # prints its progress to stderr
    noted = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(procs)]
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    last = {event["event"]: event for event in events}
    step_s = statistics.median(second for rank in noted for second in rank["times"])
    seconds = [step_s, last["saving"]["held_s"], last["checkpoint"]["seconds"], noted[0]["sent"]]
    return [rank["bytes"] for rank in noted], seconds, result.weights_sha256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    hashes = set()
    count = sum(parameter.numel() for parameter in make_model(arguments.layers).parameters())
    print(f"{count / 1e6:.0f} M parameters, AdamW, torch {torch.__version__}: medians of {arguments.turns}\n")
    columns = "ranks | sharded | state on a rank, MB | step, ms | ratio | held by a save, ms | until saved, s"
    print(f"| {columns} | sent per step, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for procs in arguments.ranks:
        kept, seconds = {}, defaultdict(list)
        for _ in range(arguments.turns):
            for sharded in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    kept[sharded], taken, digest = measure(
                        procs, sharded, arguments.layers, arguments.steps, Path(folder)
                    )
                seconds[sharded].append(taken)
                hashes.add(digest)
        medians = {sharded: list(map(statistics.median, zip(*seconds[sharded], strict=True))) for sharded in kept}
        for sharded, (step_s, held_s, saved_s, sent) in medians.items():
            held = " to ".join(
                dict.fromkeys(f"{value / 1e6:.0f}" for value in (min(kept[sharded]), max(kept[sharded])))
            )
            print(
                f"| {procs} | {'yes' if sharded else 'no'} | {held} | {1e3 * step_s:.0f} "
                f"| {step_s / medians[False][0]:.2f} | {1e3 * held_s:.0f} | {saved_s:.1f} | {sent / 1e6:.0f} |",
                flush=True,
            )
    print(f"\n{'one hash' if len(hashes) == 1 else f'{len(hashes)} different hashes'} of the weights")


if __name__ == "__main__":
    main()
