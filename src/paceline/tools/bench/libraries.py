"""The loops of other libraries, as their users write them, with the same model, data and optimizer.

The process group exists already. Progress bars, logging and checkpoints are off, because they take time without
training. A loop returns the trained model, with its DDP wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from paceline.tools.bench.setup import LoopSetup


def accelerate(setup: LoopSetup) -> nn.Module:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=setup.device.type == "cpu", mixed_precision="no")
    model: nn.Module = setup.model()
    loader = setup.loader(setup.workload.dataset_fn(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, setup.adam(model), loader)
    total = torch.zeros((), device=accelerator.device)
    for x, y in _endless(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        total += loss.detach()
        if setup.timer.tick():
            break
    return model


def fabric(setup: LoopSetup) -> nn.Module:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=setup.device.type, devices=setup.procs, strategy="ddp", precision="32-true")
    fabric.launch()
    model: nn.Module = setup.model()
    model, optimizer = fabric.setup(model, setup.adam(model))
    loader = fabric.setup_dataloaders(setup.loader(setup.workload.dataset_fn(), shuffle=True))
    total = torch.zeros((), device=fabric.device)
    for x, y in _endless(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        total += loss.detach()
        if setup.timer.tick():
            break
    return model


def _endless(loader: Any) -> Iterator[Any]:
    """The batches of an endless sequence of epochs."""
    while True:
        yield from loader


def lightning(setup: LoopSetup) -> nn.Module:
    """Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setup.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setup.adam(self)

    trained: list[nn.Module] = []

    class LightningTimer(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trained.append(trainer.strategy.model)  # its DDP wrapper is removed at the end

        def on_train_batch_end(self, *_: Any) -> None:
            setup.timer.tick()

    trainer = lightning.Trainer(
        accelerator=setup.device.type, devices=setup.procs, strategy="ddp", precision="32-true",
        max_epochs=-1, max_steps=setup.timer.steps, callbacks=[LightningTimer()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), setup.loader(setup.workload.dataset_fn(), shuffle=True))
    return trained[0]


class WithLoss(nn.Module):
    """A model in the form that transformers expects: keyword inputs, and its loss among the outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def _named(samples: list[Any]) -> dict[str, torch.Tensor]:
    x, y = default_collate(samples)
    return {"x": x, "labels": y}


def transformers(setup: LoopSetup) -> nn.Module:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TransformersTimer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            setup.timer.tick()

    is_cpu = setup.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir="transformers", use_cpu=is_cpu, per_device_train_batch_size=setup.workload.batch_size,
        max_steps=setup.timer.steps, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        dataloader_num_workers=setup.workers, dataloader_persistent_workers=setup.workers > 0,
        dataloader_pin_memory=not is_cpu, ddp_find_unused_parameters=False, ddp_backend="gloo" if is_cpu else "nccl",
    )  # fmt: skip
    model = WithLoss(setup.model())
    trainer = Trainer(
        model, arguments, train_dataset=setup.workload.dataset_fn(), data_collator=_named,
        optimizers=(setup.adam(model), None), callbacks=[TransformersTimer()],
    )  # fmt: skip
    trainer.train()
    wrapped: nn.Module = trainer.model_wrapped
    return wrapped
