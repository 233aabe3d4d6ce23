"""The loops of `large_models.py`: by hand, Lightning, and Paceline. Each returns samples per second and memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from large_workloads import Batch, of_hidden, of_logits
from torch import nn
from torch.utils.data import DataLoader

from paceline import Callback, Run, Trainer
from paceline.system.memory import used_on

SHARE = 0.9  # of the samples are for training: by default Paceline's `val_fraction` is 0.1
FIGURES = "figures.json"
TOTAL_STEPS = 100_000  # of the run to which the counted steps belong; GPT-2 is trained for more


@dataclass
class Setting:
    """What all contenders share, and the time of the counted steps."""

    work: Any
    feed: str
    warm_up: int
    steps: int  # that are counted
    workers: int
    repeats: int
    device: torch.device
    folder: Path
    began: float
    step: int = 0
    since: float = 0.0

    @property
    def samples(self) -> int:
        """The samples of one epoch, after which all loops end; some are for Paceline's validation."""
        return -(-round(10 * (self.warm_up + self.steps) * self.work.batch) // round(10 * SHARE))

    def dataset(self) -> Any:
        if self.feed == "memory":
            return self.work.in_memory(self.samples)
        return self.work.on_disk(self.folder, self.samples)

    def batches(self) -> Any:
        """The batches of a loop without Paceline."""
        if self.feed == "memory":
            return BatchesOnDevice(self.dataset().tensors, self.work.batch, self.device)
        return DataLoader(
            self.dataset(), self.work.batch, shuffle=True, drop_last=True, num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )  # fmt: skip

    def autocast(self) -> AbstractContextManager[Any]:
        is_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if is_cuda else nullcontext()

    def tick(self) -> bool:
        """Count a step; returns whether it was the last one. Waits for the device where counting begins and ends."""
        self.step += 1
        if self.step in (self.warm_up, self.warm_up + self.steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.since, self.seconds = time.time(), time.time() - self.since
        return self.step == self.warm_up + self.steps

    def figures(self) -> dict[str, Any]:
        """The outcome of a loop that has called `tick` after every step."""
        return {
            "samples_per_s": [self.steps * self.work.batch / self.seconds],
            "memory_gb": used_on(self.device) / 1e9,
            "ready_s": self.since - self.seconds - self.began,
        }


class BatchesOnDevice:
    """Batches of tensors on the device, in order."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], size: int, device: torch.device) -> None:
        self.tensors, self.size = [tensor.to(device) for tensor in tensors], size

    def __len__(self) -> int:
        return len(self.tensors[0]) // self.size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for start in range(0, len(self) * self.size, self.size):
            yield tuple(tensor[start : start + self.size] for tensor in self.tensors)


class WithLoss(nn.Module):
    """A model and its loss, to compile both together."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        made = setting.work.model()
        self.model = made.to(memory_format=torch.channels_last) if setting.work.unit == "images" else made

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return of_logits(self.model(x), target)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def by_hand(setting: Setting, *, compiled: bool) -> dict[str, Any]:
    """A loop without any library."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    model = WithLoss(setting).to(setting.device)
    optimizer = adamw(model)
    loss_of = torch.compile(model, dynamic=False) if compiled else model
    total = torch.zeros((), device=setting.device)
    for batch in setting.batches():
        x, target = (tensor.to(setting.device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            loss = loss_of(x, target)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if setting.tick():
            break
    return setting.figures()


def lightning(setting: Setting) -> dict[str, Any]:
    """Lightning's Trainer around a compiled model."""
    import lightning

    torch.set_float32_matmul_precision("high")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = WithLoss(setting)
            self.loss_of = torch.compile(self.model, dynamic=False)

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.loss_of(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    class Ticks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            setting.tick()

    is_cuda = setting.device.type == "cuda"
    lightning.Trainer(
        accelerator=setting.device.type, devices=1, precision="bf16-mixed" if is_cuda else "32-true", benchmark=True,
        max_epochs=1, max_steps=setting.warm_up + setting.steps, callbacks=[Ticks()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), setting.batches())  # fmt: skip
    return setting.figures()


class Ticks(Callback):
    """Counts the steps as the other loops do, writes the figures to the folder of the run, and ends it."""

    needs_step_metrics = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def on_step(self, run: Run, metrics: Any) -> None:
        if self.setting.tick():
            (run.folder / FIGURES).write_text(json.dumps(self.setting.figures()), encoding="utf-8")
            run.finish("all steps are measured")


def paceline(setting: Setting, *, has_logits: bool = True, **keys: Any) -> dict[str, Any]:
    """Paceline with its defaults and these keys, several times, with the times of the first run to the first steps.

    Each run is the first epoch of a long one, because `step_mode: auto` compiles only long runs.
    """
    epochs = -(-TOTAL_STEPS // (setting.warm_up + setting.steps))
    if setting.feed == "loader":
        keys["workers"] = setting.workers
    found: dict[str, Any] = {"samples_per_s": [], "hashes": [], "warnings": []}
    for _ in range(setting.repeats):
        result = Trainer(
            model_fn=partial(setting.work.model, has_logits), dataset_fn=setting.dataset,
            loss_fn=of_logits if has_logits else of_hidden, batch_size=setting.work.batch,
            num_epochs=epochs, callbacks=[Ticks(setting)], **keys,
        ).start()  # fmt: skip
        figures = json.loads((result.run_dir / FIGURES).read_text(encoding="utf-8"))
        found["samples_per_s"] += figures.pop("samples_per_s")
        found = {**figures, **found}
        lines = (result.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        found["hashes"].append(result.weights_sha256)
        found["warnings"] = [event["text"] for event in map(json.loads, lines) if event["event"] == "warning"]
    return found


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    title: str
    package: str
    loop: Callable[[Setting], dict[str, Any]]


def with_keys(title: str, **keys: Any) -> Contender:
    return Contender(f"Paceline, {title}", "paceline", partial(paceline, **keys))


DEFAULT = ["eager", "paceline", "compile", "lightning"]
CONTENDERS = {
    "eager": Contender("by hand", "torch", partial(by_hand, compiled=False)),
    "paceline": Contender("Paceline, defaults", "paceline", paceline),
    "compile": Contender("by hand, compiled", "torch", partial(by_hand, compiled=True)),
    "lightning": Contender("Lightning Trainer, compiled", "lightning", lightning),
    "paceline-inexact": with_keys("exact: false", exact=False),
    "paceline-compile": with_keys("step_mode: compile", step_mode="compile"),
    "paceline-compile-inexact": with_keys("step_mode: compile, exact: false", step_mode="compile", exact=False),
    "paceline-loss": with_keys("linear_cross_entropy", has_logits=False),
    "paceline-loss-inexact": with_keys("linear_cross_entropy, exact: false", has_logits=False, exact=False),
}  # fmt: skip
