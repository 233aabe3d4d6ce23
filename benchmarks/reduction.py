"""What exactness costs across ranks: times of a training step and of the bare collectives, memory, and bytes sent.

    python benchmarks/reduction.py --procs 2,3,4,6,8 --mb 1,25,100 [--device cuda] [--json out.json]
    python benchmarks/reduction.py --procs 2,4,8 --one-gpu           # NCCL ranks that share one GPU
    python benchmarks/reduction.py --procs "" --parameters 124.4     # only the table of bytes, which is computed

With `--one-gpu` each rank claims to be a host of its own, which NCCL accepts, so all bytes go through sockets: the
times of the sums are real, those of the network are not. NVIDIA's MPS, where it is installed, lets the kernels of
several ranks run at the same time; processes would otherwise take turns on the GPU, and wait for that in every sum.

Each number of ranks is one local run, with one lane per rank; it measures the variants in turn, so that noise affects
all of them equally: "all-reduce" is torch's, in DDP without a hook; "not exact" sums numbers as they are, which is how
steps of two lanes are summed; "exact" sums integers. The first table has medians in milliseconds, and the ratios to
"all-reduce". A step is DDP on stacked square layers whose gradients have the given size, forward and backward included,
with 64 rows on a CPU and 4,096 on a GPU.

The second table is what the second step of "exact" has kept beside the parameters and the buckets of DDP: memory for
the largest parts of buckets so far (`Scratch`) and the gradients of finished lanes (`LaneGradients`). A rank with
several lanes also needs the size of a part while it rounds that part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import Trainer

VARIANTS = ("all-reduce", "not exact", "exact")
ROWS = {"cpu": 64, "cuda": 4096}  # of the batch of a training step
LEAST_LANES = 3  # steps of one or two lanes are summed by torch's all-reduce
LANES_PER_RANK = (1, 2, 4)  # of which memory is measured
ELEMENTS_PER_EXPONENT = 256
WORLDS = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)


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


# --- measured on every rank ------------------------------------------------------------------------------------------


def measure(
    model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure on every rank; rank 0 returns the rows. All ranks."""
    from paceline.engine.reduce import Reduction
    from paceline.world import World

    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device, dist.get_backend())
    lanes = max(world.size, LEAST_LANES)
    times, memory = [], []
    for mb in model.module.sizes:
        flat = torch.randn(mb * 250_000, device=device)
        reductions = {name: Reduction(world, lanes, exact=name == "exact") for name in VARIANTS[1:]}
        reductions = {VARIANTS[0]: None, **reductions}
        bare = {name: partial(_sum, reduction, flat) for name, reduction in reductions.items()}
        steps = {name: _training_step(mb, reduction, device) for name, reduction in reductions.items()}
        rounds = 20 if mb < 100 else 10
        for kind, variants in (("bare collective", bare), ("training step", steps)):
            times.append({"mb": mb, "kind": kind, "ranks": world.size, **_take_turns(variants, rounds, device)})
        for each in LANES_PER_RANK:
            memory.append({"mb": mb, "ranks": world.size, "lanes": each, **_memory(mb, each, world)})
    return {"times": times, "memory": memory}


def _sum(reduction: Any, flat: torch.Tensor) -> None:
    buffer = flat.clone()
    if reduction is None:
        dist.all_reduce(buffer)
        return
    reduction.start([buffer], [], buffer, is_empty=False).wait()


def _training_step(mb: int, reduction: Any, device: torch.device, lanes: int = 1) -> Any:
    """A function that runs a step, and returns the gradients that it has kept of finished lanes.

    Without a reduction, DDP sums the gradients by itself.
    """
    from paceline.engine.bucket_hook import BucketHook
    from paceline.engine.reduce import LaneGradients

    stack = nn.parallel.DistributedDataParallel(Stack(mb).to(device), gradient_as_bucket_view=True)
    parameters = list(stack.module.parameters())
    hook = BucketHook(parameters, reduction) if reduction is not None else None
    if hook is not None:
        stack.register_comm_hook(hook, BucketHook.reduce)
    batch = torch.randn(ROWS[device.type], stack.module.width, device=device)
    finished = LaneGradients(keeps_each=True)

    def step() -> list[list[torch.Tensor]]:
        finished.restart()
        for lane in range(lanes):
            if (is_last := lane == lanes - 1) and hook is not None:
                hook.begin(finished.lanes, is_empty=False)
            stack.zero_grad()
            with stack.no_sync() if not is_last else torch.enable_grad():
                stack(batch).square().mean().backward()
            if not is_last:
                finished.add([parameter.grad for parameter in parameters])
        return finished.lanes

    return step


def _memory(mb: int, lanes: int, world: Any) -> dict[str, int]:
    """The bytes that a step with several lanes on each rank has kept. All ranks."""
    from paceline.engine.reduce import Reduction

    reduction = Reduction(world, max(lanes * world.size, LEAST_LANES), exact=True)
    step = _training_step(mb, reduction, world.device, lanes)
    step()  # DDP divides the parameters into other buckets after it
    kept = step()
    scratches = [queue.scratch for queue in reduction._queues] or [reduction._scratch]
    taken = [item for each in scratches for item in each._taken.items()]
    return {
        "gradients": sum(parameter.nbytes for parameter in Stack(mb).parameters()),
        "scratch": sum(tensor.nbytes for _, tensors in taken for tensor in tensors),
        "rounding": max(each.nbytes for (purpose, _), tensors in taken if purpose == "values" for each in tensors)
        if lanes > 1
        else 0,
        "finished": sum(gradient.nbytes for lane in kept for gradient in lane),
    }


def _take_turns(variants: dict[str, Any], rounds: int, device: torch.device) -> dict[str, float]:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        # Each round begins with another variant, because the first one after a pause is faster.
        order = list(variants) if turn % 2 else list(reversed(variants))
        for name in order:
            dist.barrier()
            wait()
            began = time.perf_counter()
            variants[name]()
            wait()
            if turn >= 2:  # the first two rounds are warm-up
                times[name].append(time.perf_counter() - began)
    return {name: round(1e3 * statistics.median(taken), 2) for name, taken in times.items()}


# --- starting the ranks ----------------------------------------------------------------------------------------------


def measure_ranks(sizes: list[int], device: str, procs: int | None) -> dict[str, list[dict[str, Any]]]:
    """The rows of one number of ranks; without a number, this process is one of the ranks."""
    measured: dict[str, list[dict[str, Any]]] = Trainer(
        lambda: Sizes(sizes), lambda: torch.zeros(64, 1), train_fn=measure, procs=procs, device=device,
        val_fraction=0, name="benchmark-reduction",
    ).start().value  # fmt: skip
    return measured


def measure_on_one_gpu(procs: int, words: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The same with ranks of torchrun, each of which runs this script again."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}"]
        command = [*torchrun, str(Path(__file__).resolve()), *words, "--json", "rows.json"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{procs} ranks failed\n{ended.stderr[-3000:]}")
        rows: dict[str, list[dict[str, Any]]] = json.loads((Path(folder) / "rows.json").read_text())
        return rows


@contextmanager
def kernels_at_the_same_time() -> Iterator[None]:
    """Start MPS for the processes that are started within, where it is installed."""
    if (control := shutil.which("nvidia-cuda-mps-control")) is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def be_rank_on_one_gpu() -> None:
    """Claim to be a host of its own, before torch makes the process group."""
    os.environ.update(NCCL_HOSTID=f"host-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


# --- tables ----------------------------------------------------------------------------------------------------------


class Sizes(nn.Linear):
    """A model that sends the sizes to the ranks."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(1, 1)
        self.sizes = sizes


def print_times(rows: list[dict[str, Any]]) -> None:
    titles = " | ".join(f"{name}, ms" for name in VARIANTS)
    print(f"\n| ranks | gradients | measured | {titles} | ratios |\n|{'---|' * 7}")
    for row in rows:
        ratios = ", ".join(f"{row[name] / row[VARIANTS[0]]:.2f}" for name in VARIANTS[1:])
        times = " | ".join([*(f"{row[name]:.1f}" for name in VARIANTS), ratios])
        print(f"| {row['ranks']} | {row['mb']} MB | {row['kind']} | {times} |", flush=True)


def print_memory(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print("\n| ranks | gradients | lanes on a rank | scratch, MB | while rounding, MB | finished lanes, MB | copies |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        parts = [row["scratch"], row["rounding"], row["finished"]]
        text = " | ".join(f"{part / 1e6:.1f}" for part in parts)
        print(f"| {row['ranks']} | {row['mb']} MB | {row['lanes']} | {text} | {sum(parts) / row['gradients']:.2f} |")


def print_bytes(parameters: float) -> None:
    """What a rank sends in a step, by formula, for a number of parameters in millions."""
    print(f"\n| ranks | all-reduce in a ring | integers | tree of pairs |\n|{'---|' * 4}")
    for world in WORLDS:
        ring = 2 * (world - 1) / world
        ways = [ring, ring * (1 + 1 / ELEMENTS_PER_EXPONENT), math.log2(world)]
        cells = [f"{way:.3f} × ({way * 4 * parameters:,.0f} MB)" for way in ways]
        print(f"| {world} | {' | '.join(cells[:2])} | {cells[2] if ways[2].is_integer() else '—'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--procs", default="2,3,4,6,8")
    parser.add_argument("--mb", default="1,25,100")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one-gpu", action="store_true", help="NCCL ranks that share one GPU, started by torchrun")
    parser.add_argument("--parameters", type=float, default=124.4, help="millions, for the table of bytes")
    parser.add_argument("--json")
    options = parser.parse_args()
    sizes = [int(mb) for mb in options.mb.split(",")]
    device = "cuda" if options.one_gpu and torch.cuda.is_available() else options.device
    if options.one_gpu and "RANK" in os.environ:
        be_rank_on_one_gpu()
        measured = measure_ranks(sizes, device, None)
        if os.environ["RANK"] == "0":
            Path(options.json).write_text(json.dumps(measured))
        return
    rows: dict[str, list[dict[str, Any]]] = {"times": [], "memory": []}
    for procs in map(int, filter(None, options.procs.split(","))):
        if options.one_gpu:
            with kernels_at_the_same_time():
                measured = measure_on_one_gpu(procs, ["--one-gpu", "--mb", options.mb])
        else:
            measured = measure_ranks(sizes, device, procs)
        for kind in rows:
            rows[kind] += measured[kind]
        print_times(measured["times"])  # now, in case a larger number of ranks is stopped
    print_memory(rows["memory"])
    print_bytes(options.parameters)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


main()
