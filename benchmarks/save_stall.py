"""How long a save blocks training, for several methods that are measured in turn in one run.

    python benchmarks/save_stall.py [--mb 100 3000] [--turns 5] [--folder /tmp]

The state is a model with AdamW: weights and two moments. Each method is timed from its call until the next
step can begin on the device; the rest of the save, which runs during training, is awaited and timed separately.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from paceline.checkpoint.files import split_into_files
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import capture
from paceline.checkpoint.store import Store
from paceline.config import Checkpoint
from paceline.observe.events import Events
from paceline.world import World

Wait = Callable[[], Any]
WIDTH = 1024


class Ways:
    """Each method starts a save and returns a function that waits for its end."""

    def __init__(self, megabytes: int, device: torch.device, folder: Path) -> None:
        layers = max(1, round(megabytes * 2**20 / (3 * 4 * WIDTH * (WIDTH + 1))))
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(2, WIDTH, device=device)).sum().backward()
        self.optimizer.step()
        self.folder, self.step = folder, 0
        world = World(rank=0, local_rank=0, size=1, device=device, backend="gloo")
        self.saver = Saver(Store(folder / "ours"), Checkpoint(keep=1), {}, world, Events(None))
        self.saver.reserve(self.state())
        self.buffers, state = HostBuffers(), self.state()
        self.files = split_into_files(state)
        self.buffers.reserve(state, self.files)
        self.size = state.nbytes

    def state(self) -> Any:
        return capture(self.model, self.optimizer, None, {})

    def plain(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def blocking(self) -> Wait:
        torch.save(self.plain(), self.folder / "blocking.pt")
        return lambda: None

    def dcp_async(self) -> Wait:
        return dcp.async_save(self.plain(), checkpoint_id=str(self.folder / "dcp")).result

    def copy_alone(self) -> Wait:
        return self.buffers.copy(self.state(), self.files)

    def paceline(self) -> Wait:
        self.step += 1
        self.saver.start(self.step, self.state(), {})
        return self.saver.finish


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 3000])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{on}, torch {torch.__version__}: medians of {arguments.turns}\n")
    print("| state | way | held, s | share of blocking | until saved, s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as path:
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 1), rank=0, world_size=1)
        for megabytes in arguments.mb:
            folder = Path(path) / str(megabytes)
            folder.mkdir()
            measure(Ways(megabytes, device, folder), device, arguments.turns)
            shutil.rmtree(folder)
        dist.destroy_process_group()


def measure(ways: Ways, device: torch.device, turns: int) -> None:
    names = {
        "torch.save": ways.blocking, "dcp.async_save": ways.dcp_async, "copy to the host alone": ways.copy_alone,
        "Paceline": ways.paceline,
    }  # fmt: skip
    held: dict[str, list[float]] = {name: [] for name in names}
    whole: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name, begin in names.items():
            settle(device)
            began = time.perf_counter()
            wait = begin()
            settle(device)
            stood = time.perf_counter() - began
            wait()
            if turn:  # the first round is warm-up
                held[name].append(stood)
                whole[name].append(time.perf_counter() - began)
    blocking = statistics.median(held["torch.save"])
    for name in names:
        median, until = statistics.median(held[name]), statistics.median(whole[name])
        print(f"| {ways.size / 1e6:,.0f} MB | {name} | {median:.4f} | {median / blocking:.1%} | {until:.2f} |")


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
