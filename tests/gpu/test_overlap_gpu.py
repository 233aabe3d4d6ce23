"""Sums over NCCL ranks begin while backward computes: eagerly, recorded and compiled; seen in a trace of one step."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.nccl import torchrun

LAYERS = 8  # of 17 MB each
SCRIPT = """
import json, os, sys
import torch
from torch import nn
from paceline import Callback, Trainer

rank, (out, step_mode) = int(os.environ["RANK"]), sys.argv[1:3]
WIDTH, LAYERS, BATCH, TRACED = 2048, int(sys.argv[3]), 512, 19
PRODUCTS = ("gemm", "nvjet", "cutlass", "::mm", "::addmm")


class Trace(Callback):
    needs_step_metrics = False

    def on_start(self, run):
        self.profile = torch.profiler.profile()

    def on_step(self, run, metrics):
        if run.step_number == TRACED:
            torch.cuda.synchronize()
            self.profile.start()
        if run.step_number == TRACED + 1:
            torch.cuda.synchronize()
            self.profile.stop()

    def on_stop(self, run, reason):
        kernels = [each for each in self.profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        products = sorted(
            each.time_range.start for each in kernels if any(word in each.name.lower() for word in PRODUCTS)
        )
        sums = sorted(each.time_range.start for each in kernels if "nccl" in each.name.lower())
        after = sum(start > sums[0] for start in products) if sums else None
        if rank == 0:
            with open(out + ".trace.json", "w") as file:
                json.dump({"products": len(products), "after": after, "sums": len(sums)}, file)


def model():
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def dataset():
    x = torch.randn(8 * BATCH, WIDTH, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(x, x.roll(1, 1))


result = Trainer(
    model, dataset, loss_fn="mse_loss", optimizer={"name": "adamw", "lr": 1e-4}, batch_size=BATCH, lanes=4,
    num_epochs=12, val_fraction=0, run_dir=out, step_mode=step_mode, callbacks=[Trace()],
).start()
if rank == 0:
    events = [json.loads(line) for line in open(out + "/events.jsonl")]
    warnings = [event["text"] for event in events if event["event"] == "warning"]
    with open(out + ".json", "w") as file:
        json.dump({"hash": result.weights_sha256, "warnings": warnings}, file)
"""


@cache
def train(folder: Path, ranks: int, step_mode: str) -> dict[str, Any]:
    """The hash of a run, and what a trace of one of its steps shows."""
    out = folder / f"{ranks}-{step_mode}"
    torchrun(folder, SCRIPT, ranks, out, step_mode, LAYERS, timeout_s=200)
    parts = [json.loads(Path(f"{out}{end}").read_text()) for end in (".json", ".trace.json")]
    found: dict[str, Any] = {**parts[0], **parts[1]}
    print(ranks, step_mode, found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlap")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step_mode", ["eager", "graph", "compile"])
def test_sums_over_ranks_begin_while_backward_computes(folder: Path, step_mode: str) -> None:
    found = train(folder, 2, step_mode)
    assert not [text for text in found["warnings"] if "CUDA graphs" in text]
    # Each lane has a forward product and, except for the first layer, two backward products for each layer.
    assert found["products"] >= 2 * (3 * LAYERS - 1)
    assert found["after"] >= 2, "the sums began when backward had ended"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_compiled_parts_have_the_bits_of_one_rank(folder: Path, ranks: int) -> None:
    assert train(folder, ranks, "compile")["hash"] == train(folder, 1, "compile")["hash"]
