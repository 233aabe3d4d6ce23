"""How much a mirror slows training down: the time of a step with and without `checkpoint.mirror`, in turn in one run.

    python benchmarks/mirror.py [--mb 60] [--turns 5] [--epochs 2] [--procs 1] [--mirror FOLDER_OR_URL]

The state is a model with AdamW: weights and two moments. It is saved every 40 steps, so that a copy is always in
progress. Without `--mirror`, a temporary folder is used; for S3, start a server and set AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import Trainer

WIDTH, SAMPLES, BATCH = 512, 5120, 32


def make_model(layers: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)], nn.Linear(WIDTH, 10))


def make_data() -> Any:
    numbers = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(numbers, (numbers[:, :10]).argmax(1))


def step_ms(layers: int, folder: Path, epochs: int, procs: int, mirror: str | None) -> float:
    """The mean time of a step of one run."""
    result = Trainer(
        partial(make_model, layers), make_data, loss_fn=functional.cross_entropy, val_fraction=0.0, batch_size=BATCH,
        lanes=procs, procs=procs, num_epochs=epochs, run_dir=folder, log={"tensorboard": False},
        checkpoint={"every_steps": 40, "every_minutes": None, "keep": 2, "mirror": mirror},
    ).start()  # fmt: skip
    return 1000 * result.seconds / result.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=60, help="the size of a checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--mirror")
    options = parser.parse_args()
    layers = max(1, round(options.mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    times: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as top:
        for turn in range(options.turns + 1):  # the first one warms up
            for name in times:
                mirror = (options.mirror or f"{top}/mirror") if name == "with" else None
                folder = Path(top) / f"{name}-{turn}"
                measured = step_ms(layers, folder, options.epochs, options.procs, mirror)
                if turn:
                    times[name].append(measured)
    ratios = [after / before for before, after in zip(times["without"], times["with"], strict=True)]
    for name, values in times.items():
        print(f"{name} a mirror: {statistics.median(values):.2f} ms a step (median of {len(values)} runs)")
    print(f"ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
