"""The loops without other libraries: DDP written by hand, a CUDA graph recorded by hand, and Paceline.

A loop trains until the timer has counted all steps, and returns the trained model, with its DDP wrapper if it has one.
Paceline starts its ranks itself; for the others, the process group exists already.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from paceline import Trainer
from paceline.tools.bench.models import OneByOne
from paceline.tools.bench.setup import LoopSetup


def hand_written(setup: LoopSetup) -> nn.Module:
    """DDP written by hand, without avoidable waits for the device."""
    device, dataset = setup.device, setup.workload.dataset_fn()
    model: nn.Module = DistributedDataParallel(
        setup.model().to(device),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    optimizer = setup.adam(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, setup.procs, setup.rank)
    loader = setup.loader(dataset, sampler=sampler)
    total = torch.zeros((), device=device)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
            if setup.timer.tick():
                return model
    raise AssertionError("the timer never ends")


def recorded(setup: LoopSetup) -> nn.Module:
    """The shortest step on a GPU: data in GPU memory, bf16, and the whole step in one CUDA graph."""
    device, batch_size = setup.device, setup.workload.batch_size
    x, y = (tensor.to(device) for tensor in setup.workload.dataset_fn().tensors)
    model: nn.Module = setup.model().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.workload.lr, fused=True, capturable=True)
    total, chosen = torch.zeros((), device=device), torch.zeros(batch_size, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        batch = x[chosen]
        if batch.ndim == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(batch), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total.add_(loss.detach())

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in itertools.count():
            for indices in torch.randperm(len(x), device=device).view(-1, batch_size):
                chosen.copy_(indices)
                graph.replay()
                if setup.timer.tick():
                    return model
    raise AssertionError("the timer never ends")


def paceline_by_default(setup: LoopSetup) -> None:
    """Paceline with its default settings."""
    _train(setup, setup.workload.dataset_fn)


def paceline_samplewise(setup: LoopSetup) -> None:
    """Paceline in fp32 with a data set that returns single samples, so that it uses a DataLoader like the others."""
    _train(setup, functools.partial(_one_by_one, setup.workload.dataset_fn), precision="fp32")


def _one_by_one(dataset_fn: Callable[[], TensorDataset]) -> OneByOne:
    return OneByOne(dataset_fn())


def _train(setup: LoopSetup, dataset_fn: Callable[[], Dataset[Any]], **options: Any) -> None:
    timer = setup.timer
    result = Trainer(
        model_fn=setup.workload.model_fn, dataset_fn=dataset_fn, loss_fn=cross_entropy, val_fraction=0.0,
        optimizer={"name": "adam", "lr": setup.workload.lr}, batch_size=setup.workload.batch_size,
        max_steps=timer.steps, num_epochs=timer.steps, procs=setup.procs,
        device="cuda" if setup.device.type == "cuda" else "cpu", workers=setup.workers, launcher="local",
        log={"every_steps": timer.window}, **options,
    ).start()  # fmt: skip
    samples = timer.window * setup.workload.batch_size * setup.procs
    timer.seconds = [samples / speed for speed in window_speeds(result.run_dir / "events.jsonl", timer.window)]


def window_speeds(path: Path, window: int) -> list[float]:
    """Samples per second of each complete window; windows that end early with their epoch are skipped."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    paces = [{"step": 0}, *(event for event in events if event["event"] == "pace")]
    return [event["samples_per_s"] for last, event in pairwise(paces) if event["step"] - last["step"] == window]
