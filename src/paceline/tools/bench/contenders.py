"""The loops that are compared: each as a user of its library would write it, with the same model, data and optimizer.

The process group is there already. What costs time without training anything, such as progress bars, is off.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from paceline import Trainer
from paceline.tools.bench.models import OneByOne, Workload


@dataclass
class Clock:
    """Times windows of equally many steps."""

    steps: int  # until the end, with those that warm up
    window: int
    device: torch.device
    seconds: list[float] = field(default_factory=list)  # of each window
    step: int = 0
    since: float = field(default_factory=time.perf_counter)

    def tick(self) -> bool:
        """A step is done; whether it was the last."""
        self.step += 1
        if self.step % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            self.seconds.append(now - self.since)
            self.since = now
        return self.step == self.steps


@dataclass
class Setting:
    """What a contender is given."""

    workload: Workload
    rank: int
    procs: int
    device: torch.device
    workers: int
    clock: Clock

    def model(self) -> nn.Module:
        """A new model, on the CPU, with the same weights each time."""
        torch.manual_seed(0)
        return self.workload.model_fn()

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all."""
        return torch.optim.Adam(model.parameters(), lr=self.workload.lr)

    def loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """The DataLoader that the loops in plain Python share, as a careful user has it."""
        return DataLoader(
            dataset, batch_size=self.workload.batch_size, num_workers=self.workers, persistent_workers=self.workers > 0,
            pin_memory=self.device.type == "cuda", **options,
        )  # fmt: skip


# Trains until the clock has run out; returns the model as it was trained, which tells whether DDP was there.
Loop = Callable[[Setting], nn.Module]


def hand_written(setting: Setting) -> nn.Module:
    """DDP by hand, without needless waits for the device."""
    device, dataset = setting.device, setting.workload.dataset_fn()
    model: nn.Module = DistributedDataParallel(
        setting.model().to(device),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    optimizer = setting.adam(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, setting.procs, setting.rank)
    loader = setting.loader(dataset, sampler=sampler)
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
            if setting.clock.tick():
                return model
    raise AssertionError("the clock never ends")


def recorded(setting: Setting) -> nn.Module:
    """The least that a step can take on a GPU: rows that lie there, bf16, and all of the step one CUDA graph."""
    device, batch_size = setting.device, setting.workload.batch_size
    x, y = (tensor.to(device) for tensor in setting.workload.dataset_fn().tensors)
    model: nn.Module = setting.model().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.workload.lr, fused=True, capturable=True)
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
                if setting.clock.tick():
                    return model
    raise AssertionError("the clock never ends")


def accelerate(setting: Setting) -> nn.Module:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=setting.device.type == "cpu", mixed_precision="no")
    model: nn.Module = setting.model()
    loader = setting.loader(setting.workload.dataset_fn(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, setting.adam(model), loader)
    total = torch.zeros((), device=accelerator.device)
    for x, y in _endless(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        total += loss.detach()
        if setting.clock.tick():
            break
    return model


def fabric(setting: Setting) -> nn.Module:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=setting.device.type, devices=setting.procs, strategy="ddp", precision="32-true")
    fabric.launch()
    model: nn.Module = setting.model()
    model, optimizer = fabric.setup(model, setting.adam(model))
    loader = fabric.setup_dataloaders(setting.loader(setting.workload.dataset_fn(), shuffle=True))
    total = torch.zeros((), device=fabric.device)
    for x, y in _endless(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        total += loss.detach()
        if setting.clock.tick():
            break
    return model


def _endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def lightning(setting: Setting) -> nn.Module:
    """Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setting.adam(self)

    trained: list[nn.Module] = []

    class Ticks(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trained.append(trainer.strategy.model)  # DDP is taken off again at the end

        def on_train_batch_end(self, *_: Any) -> None:
            setting.clock.tick()

    trainer = lightning.Trainer(
        accelerator=setting.device.type, devices=setting.procs, strategy="ddp", precision="32-true",
        max_epochs=-1, max_steps=setting.clock.steps, callbacks=[Ticks()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), setting.loader(setting.workload.dataset_fn(), shuffle=True))
    return trained[0]


class WithLoss(nn.Module):
    """A model as transformers has them: it takes names and gives its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def _named(samples: list[Any]) -> dict[str, torch.Tensor]:
    x, y = default_collate(samples)
    return {"x": x, "labels": y}


def transformers(setting: Setting) -> nn.Module:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            setting.clock.tick()

    is_cpu = setting.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir="transformers", use_cpu=is_cpu, per_device_train_batch_size=setting.workload.batch_size,
        max_steps=setting.clock.steps, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        dataloader_num_workers=setting.workers, dataloader_persistent_workers=setting.workers > 0,
        dataloader_pin_memory=not is_cpu, ddp_find_unused_parameters=False, ddp_backend="gloo" if is_cpu else "nccl",
    )  # fmt: skip
    model = WithLoss(setting.model())
    trainer = Trainer(
        model, arguments, train_dataset=setting.workload.dataset_fn(), data_collator=_named,
        optimizers=(setting.adam(model), None), callbacks=[Ticks()],
    )  # fmt: skip
    trainer.train()
    wrapped: nn.Module = trainer.model_wrapped
    return wrapped


# --- Paceline, which starts its ranks by itself ----------------------------------------------------------------------


def paceline(setting: Setting) -> None:
    """Paceline as it comes."""
    _train(setting, setting.workload.dataset_fn)


def paceline_one_by_one(setting: Setting) -> None:
    """Paceline with the DataLoader of the others, as for data that gives one sample at a time, and their precision."""
    _train(setting, functools.partial(_one_by_one, setting.workload.dataset_fn), precision="fp32")


def _one_by_one(make: Callable[[], TensorDataset]) -> OneByOne:
    return OneByOne(make())


def _train(setting: Setting, dataset_fn: Callable[[], Dataset[Any]], **options: Any) -> None:
    clock = setting.clock
    result = Trainer(
        model_fn=setting.workload.model_fn, dataset_fn=dataset_fn, loss_fn=cross_entropy, val_fraction=0.0,
        optimizer={"name": "adam", "lr": setting.workload.lr}, batch_size=setting.workload.batch_size,
        max_steps=clock.steps, num_epochs=clock.steps, procs=setting.procs, device=setting.device.type,
        workers=setting.workers, launcher="local", log={"every_steps": clock.window}, **options,
    ).start()  # fmt: skip
    samples = clock.window * setting.workload.batch_size * setting.procs
    clock.seconds = [samples / speed for speed in _speeds(result.run_dir / "events.jsonl", clock.window)]


def _speeds(path: Path, window: int) -> list[float]:
    """Samples per second of every whole window; what an epoch's end has cut short is left out."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    paces = [{"step": 0}, *(event for event in events if event["event"] == "pace")]
    return [event["samples_per_s"] for last, event in pairwise(paces) if event["step"] - last["step"] == window]


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    title: str
    package: str  # as pip and `importlib.metadata` call it
    loop: Callable[[Setting], nn.Module | None]
    starts_ranks: bool = False  # by itself
    needs: tuple[str, ...] = ()  # further packages, which it is not installed with
    wants_one_gpu: bool = False  # and is left out elsewhere

    @property
    def packages(self) -> tuple[str, ...]:
        """All that must be installed."""
        return (self.package, *self.needs)


CONTENDERS = {
    "hand-written": Contender("hand-written DDP", "torch", hand_written),
    "recorded": Contender("CUDA graph by hand", "torch", recorded, wants_one_gpu=True),
    "paceline": Contender("Paceline", "paceline", paceline, starts_ranks=True),
    "paceline-loader": Contender("Paceline, DataLoader, fp32", "paceline", paceline_one_by_one, starts_ranks=True),
    "accelerate": Contender("Accelerate", "accelerate", accelerate),
    "fabric": Contender("Lightning Fabric", "lightning", fabric),
    "lightning": Contender("Lightning Trainer", "lightning", lightning),
    "transformers": Contender("Hugging Face Trainer", "transformers", transformers, needs=("accelerate",)),
}
