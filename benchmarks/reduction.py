"""What exactness costs: a training step with `exact` on and off, and the bare collectives, in one run.

    python benchmarks/reduction.py --procs 2,4 --mb 1,25,100 [--json out.json]

Each number of ranks is one local run; it measures the variants in turn, so that noise affects all of them equally.
The table gives medians in milliseconds and the ratio to torch's all-reduce. A step is DDP on stacked square layers
whose gradients have the given size, forward and backward included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import Trainer


class Stack(nn.Module):
    """Square layers with about `mb` megabytes of weights."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        width = 500 if mb <= 1 else 1250  # a layer is 1 MB, or 6.25 MB
        layers = max(1, round(mb * 1e6 / (4 * width * width)))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def measure(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> list[dict[str, Any]]:
    """Measure on every rank; rank 0 returns the rows. All ranks."""
    from paceline.engine.reduce import BucketHook, Reduction
    from paceline.world import World

    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device, dist.get_backend())
    reductions = {"all-reduce": Reduction(world, exact=False), "exact": Reduction(world, exact=True)}
    rows = []
    for mb in model.module.sizes:
        flat = torch.randn(mb * 250_000)
        bare = {name: _collective(reduction, flat) for name, reduction in reductions.items()}
        steps = {}
        for name, reduction in reductions.items():
            stack = nn.parallel.DistributedDataParallel(Stack(mb), gradient_as_bucket_view=True)
            hook = BucketHook(list(stack.module.parameters()), reduction)
            stack.register_comm_hook(hook, BucketHook.reduce)
            steps[name] = _step(stack, hook)
        rounds = 20 if mb < 100 else 10
        for kind, variants in (("bare collective", bare), ("training step", steps)):
            times = _take_turns(variants, rounds)
            rows.append({"mb": mb, "kind": kind, "ranks": world.size, **times})
    return rows


def _collective(reduction: Any, flat: torch.Tensor) -> Any:
    return lambda: reduction.start(flat.clone()).wait()


def _step(stack: Any, hook: Any) -> Any:
    batch = torch.randn(64, stack.module.width)

    def step() -> None:
        hook.begin([], is_empty=False)
        stack(batch).square().mean().backward()

    return step


def _take_turns(variants: dict[str, Any], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        # Each round begins with another variant, because the first one after a pause is faster.
        order = list(variants) if turn % 2 else list(reversed(variants))
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            variants[name]()
            if turn >= 2:  # the first two rounds are warm-up
                times[name].append(time.perf_counter() - began)
    return {name: round(1e3 * statistics.median(taken), 2) for name, taken in times.items()}


class Sizes(nn.Linear):
    """A data set that sends the sizes to the ranks."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(1, 1)
        self.sizes = sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--procs", default="2,4")
    parser.add_argument("--mb", default="1,25,100")
    parser.add_argument("--json")
    options = parser.parse_args()
    sizes = [int(mb) for mb in options.mb.split(",")]
    rows = []
    for procs in map(int, options.procs.split(",")):
        rows += Trainer(
            lambda: Sizes(sizes), lambda: torch.zeros(64, 1), train_fn=measure, procs=procs, device="cpu",
            val_fraction=0, name="benchmark-reduction",
        ).start().value  # fmt: skip
    print("| ranks | gradients | what | all-reduce, ms | exact, ms | ratio |\n|---|---|---|---|---|---|")
    for row in rows:
        ratio = row["exact"] / row["all-reduce"]
        times = f"{row['all-reduce']:.1f} | {row['exact']:.1f} | {ratio:.2f}"
        print(f"| {row['ranks']} | {row['mb']} MB | {row['kind']} | {times} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


main()
