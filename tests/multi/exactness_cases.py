"""The runs of the exactness matrix, as a program: `torchrun --nproc_per_node=N exactness_cases.py OUT`.

It trains every case on the ranks that it finds and writes what must be equal at any number of them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import own_loop_cases as own
import torch
import torch._dynamo  # the first optimizer would import it
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline import Callback, GradualUnfreeze, MeanTeacher, Run, StandardScaler, Sum, Trainer, every, shard

LANES, BATCH = 4, 5
EVEN, ODD = 80, 83  # samples: whole steps; and a last step of 3 for four lanes, so that one lane has none


class Images(Dataset):
    """Random images of 6 × 6 with labels from their content; `augment` draws from all three generators."""

    def __init__(self, size: int = EVEN, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(size, 1, 6, 6, generator=generator)
        self.labels = (self.images.mean(dim=(1, 2, 3)) > 0).long()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            image = image + 0.1 * torch.randn_like(image) + 0.1 * np.random.rand() + 0.1 * random.random()
        return image, self.labels[index]


class Stream(IterableDataset):
    """The same images one after the other, in an order of each epoch's own if it shuffles."""

    def __init__(self, size: int = ODD, augment: bool = False, shuffle: bool = False) -> None:
        self.data, self.shuffle = Images(size, augment), shuffle

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = list(range(len(self.data)))
        if self.shuffle:
            random.shuffle(order)
        return (self.data[index] for index in shard(order))


class Uneven(Stream):
    """Lanes of very different lengths: lane 0, whose statistics BatchNorm keeps, is among the short ones."""

    lengths = (7, 31, 3, 18)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        lane, _ = shard()
        first = sum(self.lengths[:lane])
        return (self.data[index] for index in range(first, first + self.lengths[lane]))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 2)
    )


def layer_net() -> nn.Module:
    """No BatchNorm, so that lanes of a single sample train."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))


def scaled_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), StandardScaler(36), layer_net())


class Shared(nn.Module):
    """One layer used twice, so its parameters are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(36, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.again = self.middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(torch.relu(self.middle(torch.relu(self.first(x.flatten(1)))))))


class Remembering(nn.Module):
    """Reads buffers that its forward changes: a queue of what it saw, the vectors of a spectral norm, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(36, 16))
        self.last = nn.Linear(16, 2)
        self.register_buffer("queue", torch.randn(3, 36))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        output: torch.Tensor = self.last(torch.relu(self.first(x + self.queue.mean(0)))) / (1 + self.seen).log1p()
        self.seen += 1  # in evaluations, too
        self.queue = torch.cat([x.detach().nan_to_num(0, 1, -1).mean(0, keepdim=True), self.queue[:2]])
        return output


class Sequences(nn.Module):
    """Words, recurrence, attention and a norm of weights: pixels are taken for words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8, padding_idx=0)
        self.recurrence = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x.flatten(1)[:, :12] * 4).long().clamp(0, 9))
        output: torch.Tensor = self.last(self.attention(self.recurrence(words)[0]).mean(1))
        return output


def frozen_net() -> nn.Module:
    model = layer_net()
    model[1].weight.requires_grad_(False)
    return model


BAD = {13: float("nan"), 58: float("inf")}  # in different steps of the first epochs


class NotFinite(Images):
    """Images of which some are not finite."""

    def __init__(self, size: int = EVEN) -> None:
        super().__init__(size)
        for index, value in BAD.items():
            self.images[index] = value


class Explode(torch.autograd.Function):
    """Passes numbers on; the gradients of marked samples are infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_marked: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(is_marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (is_marked,) = ctx.saved_tensors
        return torch.where(is_marked[:, None], torch.inf, gradient), None


class Exploding(nn.Module):
    """Its loss is finite for any image; its gradients are not where the image is not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Explode.apply(self.net(x.nan_to_num(0, 3, -3)), ~x.isfinite().flatten(1).all(1))


class Sometimes(nn.Module):
    """A branch that only some lanes use: those whose first pixel of the first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(36, 2), nn.Linear(36, 2), nn.Linear(36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.always(x) + self.sometimes(x) if x[0, 0] > 0 else self.always(x)


class Teacher(nn.Module):
    """A student and frozen parameters that its forward moves: a teacher that follows it, and the centre of features."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(36, 16), nn.BatchNorm1d(16)) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.centre, self.last = nn.Parameter(torch.zeros(16), requires_grad=False), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.data.mul_(0.9).add_(theirs, alpha=0.1)
            goal = self.teacher(x)
            self.centre.data = 0.8 * self.centre.data + 0.2 * goal.mean(0)
        features = self.student(x)
        output: torch.Tensor = self.last(features + 0.3 * (goal - features) - self.centre)
        return output


class Guided(nn.Module):
    """A student and a frozen teacher that only a callback moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(36, 2), nn.Linear(36, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.student(x.flatten(1)) + 0.3 * self.teacher(x.flatten(1))
        return output


class Taught(nn.Module):
    """A student with BatchNorm, and a teacher with weights of its own at first."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        output: torch.Tensor = self.last(self.student(x) + 0.3 * self.teacher(x))
        return output


class Jitter(Callback):
    """Adds noise to the weights, with numbers from each generator."""

    needs_step_metrics = False

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(torch.randn_like(parameter) + np.random.rand() + random.random(), alpha=1e-3)


class FollowStudent(Callback):
    """Moves the teacher after each step, by an amount that depends on the loss and on the steps so far."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self.steps += 1
        model: Any = run.model
        with torch.no_grad():
            share = min(1.0, (metrics["loss"] or 0.0) / self.steps)
            for ours, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                ours.lerp_(theirs, share)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Centred(nn.Module):
    """Its only state is a frozen parameter that follows what a lane sees; there is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.last = nn.Parameter(torch.zeros(36), requires_grad=False), nn.Linear(36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(x.flatten(1) - self.centre)
        with torch.no_grad():
            self.centre.lerp_(x.flatten(1).mean(0), 0.1)
        return output


class Scaled(nn.Module):
    """A loss in units of its own running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(1.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output, target)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


class Positions(nn.Module):
    """Adds numbers that are its only buffer, turned as in the old tutorial on transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.randn(6, 6).unsqueeze(0).transpose(0, 1))
        self.last = nn.Linear(36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last((x[:, 0].transpose(0, 1) + self.pe).transpose(0, 1).flatten(1))
        return output


def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> Sum:
    weights = 0.3 + 1.7 * target
    return Sum((functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


class Views(nn.Module):
    """An encoder with statistics and dropout, and a head, which steps call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.encoder(x.flatten(1)))
        return output


def two_views(model: Any, batch: Any) -> dict[str, Any]:
    """Calls the encoder twice and the head once, without the model itself."""
    x, y = batch
    first, second = (model.encoder(view.flatten(1)) for view in (x, x + 0.1 * torch.randn_like(x)))
    outputs = model.head(first + second)
    distance = (first - second).square().mean()
    right = (outputs.argmax(1) == y).sum()
    return {
        "loss": functional.cross_entropy(outputs, y) + 0.1 * distance, "distance": distance,
        "accuracy": Sum(right, len(y)), "weight": Sum((0.3 + 1.7 * y).sum(), y.sum()), "constant": 0.25,
    }  # fmt: skip


scaled = Scaled()  # outside the model, and found by its name in the step


def scaled_step(model: Any, batch: Any) -> torch.Tensor:
    return scaled_of(model(batch[0]), batch[1])


def scaled_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return scaled(output, target)


class ScaledStep(nn.Module):
    """A step with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.scaled(model(batch[0]), batch[1]), "scale": self.scaled.mean.clone()}


def weighted_step(model: Any, batch: Any) -> Sum:
    return weighted_loss(model(batch[0]), batch[1])


class OwnLoss(nn.Module):
    """Returns its loss with its output, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, image: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(image)
        return Output(None if labels is None else functional.cross_entropy(logits, labels), logits)


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


class Named(Images):
    """Images and labels by name."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": image, "labels": label}


def measure(model: Any, batch: Any) -> dict[str, Any]:
    outputs, y = model(batch[0]), batch[1]
    return {"loss": functional.cross_entropy(outputs, y), "right": Sum((outputs.argmax(1) == y).sum(), len(y))}


class Gan(nn.Module):
    """A generator with dropout and a critic with statistics, whose first layers are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 36))
        self.critic = nn.Sequential(nn.Linear(36, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.critic(x.flatten(1))
        return output


def critic_step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    real = batch[0].flatten(1)
    fake = model.generator(torch.randn(len(real), 4, device=real.device)).detach()
    loss = functional.softplus(-model.critic(real)).mean() + functional.softplus(model.critic(fake)).mean()
    return {"loss": loss, "distance": (fake - real).square().mean()}


def generator_step(model: Any, batch: Any) -> torch.Tensor:
    fake = model.generator(torch.randn(len(batch[0]), 4, device=batch[0].device))
    return functional.softplus(-model.critic(fake)).mean()


def gan_optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.AdamW(model.critic.parameters(), lr=3e-3),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.05, momentum=0.9),
    }


def weighted_gan(model: Any, batch: Any) -> Sum:
    """The critic's loss, divided by a sum of weights."""
    weights = 0.3 + 1.7 * batch[1]
    return Sum((functional.softplus(-model(batch[0])).squeeze(1) * weights).sum(), weights.sum())


def shared_optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "both": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "critic": torch.optim.AdamW(model.critic.parameters(), lr=3e-3, fused=True),
    }


GAN: dict[str, Any] = {
    "model_fn": Gan, "optimizer": None, "optimizer_fn": gan_optimizers, "metrics": [],
    "step_fn": {"critic": critic_step, "generator": generator_step},
}  # fmt: skip


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=total_steps)


def masked(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose pixels are masked at random, as a collator for language models masks words."""
    images, labels = map(torch.stack, zip(*samples, strict=True))
    return images * (torch.rand(images.shape) > 0.2) + np.random.rand() + random.random(), labels


def two_random_halves(epoch: int, size: int) -> np.ndarray[Any, Any]:
    """One half of the samples in each epoch, twice."""
    half = 2 * np.random.permutation((size + 1) // 2) + epoch % 2
    return np.concatenate([half, half])[:size] % size


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(EVEN, 1, 6, 6, generator=generator), torch.randint(0, 2, (EVEN,), generator=generator)
    )


SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "convolution, BatchNorm and dropout": {"model_fn": conv_net},
    "filters that lie by channels": {"model_fn": conv_net, "channels_last": True},
    "tensors, augmented on the device": {
        "dataset_fn": tokens, "augment": {"flip": "random", "translate": 1, "cutout": 2},
    },
    "augmentation without workers": {"dataset_fn": lambda: Images(augment=True)},
    "augmentation with two workers": {"dataset_fn": lambda: Images(augment=True), "workers": 2},
    "augmentation of a held-out part, scaled by the other": {
        "model_fn": scaled_net, "dataset_fn": lambda: Images(ODD, augment=True), "val_dataset_fn": None,
        "val_fraction": 0.3,
    },
    "a size that is a multiple of nothing": {"dataset_fn": lambda: Images(ODD)},
    "easy samples first": {
        "dataset_fn": lambda: Images(ODD, augment=True), "curriculum": {"start": 0.3, "epochs": 2, "name": "root"},
        "difficulty_fn": lambda sample: float(sample[0].mean()),
    },
    "samples of small loss first": {
        "model_fn": conv_net, "dataset_fn": lambda: Images(ODD, augment=True),
        "curriculum": {"by": "loss", "start": 0.3, "epochs": 2}, "workers": 2,
    },
    "samples drawn by weights": {
        "dataset_fn": lambda: Images(ODD, augment=True), "sample_weights": lambda dataset: 1 + 3.0 * dataset.labels,
        "val_dataset_fn": None, "val_fraction": 0.3, "workers": 2,
    },
    "tensors drawn by weights": {"dataset_fn": tokens, "sample_weights": np.linspace(0, 1, EVEN)},
    "an order of the user's": {"dataset_fn": lambda: Images(ODD), "order_fn": two_random_halves},
    "clipping by the global norm": {"model_fn": conv_net, "clip_norm": 0.05},
    "AdamW": {"optimizer": ADAMW},
    "Muon": {"model_fn": conv_net, "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.1}, "clip_norm": 0.5},
    "warm-up and cosine": {"schedule": {"name": "cosine", "warmup_steps": 3, "final": 0.1}, "optimizer": ADAMW},
    "warm-up, stable, decay": {"schedule": {"name": "wsd", "warmup_steps": 3}, "optimizer": ADAMW},
    "one cycle": {"schedule": "onecycle", "optimizer": ADAMW},
    "a learning rate that falls when the metric does not": {
        "num_epochs": 5, "metrics": ["accuracy"],
        "schedule": {"name": "plateau", "metric": "accuracy", "mode": "max", "patience": 1, "factor": 0.3},
    },
    "a factor of the user's": {"schedule_fn": lambda step, total_steps: 1 / (1 + step), "optimizer": ADAMW},
    "a scheduler of torch that also sets momentum": {"scheduler_fn": one_cycle},
    "a scheduler of torch that waits for evaluations": {
        "scheduler_fn": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3),
    },
    "evaluations within epochs": {
        "model_fn": conv_net, "evaluate": {"every_steps": 3, "every_epochs": 2, "batch_size": 7},
        "schedule": {"name": "plateau", "patience": 1, "factor": 0.5, "min_delta": 0.05},
    },
    "a run that finishes early": {
        "num_epochs": 9, "early_stop": {"metric": "accuracy", "mode": "max", "patience": 2, "min_delta": 0.05},
    },
    "average of the weights": {"model_fn": conv_net, "ema": 0.9},
    "bf16 autocast": {"model_fn": conv_net, "precision": "bf16"},
    "sum and count": {"loss_fn": weighted_loss, "dataset_fn": lambda: Images(ODD)},
    "layers that read what they keep": {
        "model_fn": Remembering, "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW,
    },
    "layers that read what they keep, summed after backward": {
        "model_fn": Remembering, "dataset_fn": Uneven, "find_unused_parameters": True,
    },
    "frozen parameters that forward moves": {
        "model_fn": Teacher, "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW,
    },
    "frozen parameters that forward moves, summed after backward": {
        "model_fn": Teacher, "dataset_fn": Uneven, "find_unused_parameters": True,
    },
    "a frozen parameter that forward moves, and no buffer": {"model_fn": Centred},
    "a callback that moves frozen parameters": {
        "model_fn": Guided, "dataset_fn": lambda: NotFinite(ODD), "callbacks": [FollowStudent()],
    },
    "a mean teacher": {
        "model_fn": Taught, "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW,
        "callbacks": [MeanTeacher(decay=0.9)],
    },
    "gradual unfreezing": {
        "model_fn": conv_net, "dataset_fn": lambda: Images(ODD), "optimizer": ADAMW, "clip_norm": 0.5, "ema": 0.8,
        "callbacks": [GradualUnfreeze("1", "0", every_epochs=1)],
    },
    "gradual unfreezing by steps, sharded": {
        "model_fn": Sometimes, "find_unused_parameters": True, "optimizer": ADAMW, "shard_optimizer": True,
        "callbacks": [GradualUnfreeze("sometimes", "always.bias", every_steps=3)],
    },
    "a callback that draws random numbers": {"callbacks": [Jitter()]},
    "a loss with a buffer": {"loss_fn": Scaled(), "dataset_fn": lambda: NotFinite(ODD)},
    "a single buffer with odd strides": {"model_fn": Positions},
    "recurrence and attention": {"model_fn": Sequences, "optimizer": ADAMW, "clip_norm": 0.5},
    "a shared parameter": {"model_fn": Shared},
    "a frozen parameter": {"model_fn": frozen_net},
    "parameters that some lanes use": {"model_fn": Sometimes, "find_unused_parameters": True, "optimizer": ADAMW},
    "small buckets": {"model_fn": conv_net, "bucket_mb": 0.001},
    "eight lanes": {"lanes": 8, "batch_size": 3, "dataset_fn": lambda: Images(ODD)},
    "twelve lanes": {"lanes": 12, "batch_size": 2, "model_fn": Shared},
    "no evaluation in between": {"model_fn": conv_net, "val_fraction": 0, "val_dataset_fn": None},
    "samples that are not finite": {
        "model_fn": conv_net, "dataset_fn": NotFinite, "ema": 0.9, "optimizer": ADAMW, "clip_norm": 0.5,
    },
    "gradients that are not finite": {"model_fn": Exploding, "dataset_fn": NotFinite, "ema": 0.9, "optimizer": ADAMW},
    "not finite, and sum and count": {"loss_fn": weighted_loss, "dataset_fn": lambda: NotFinite(ODD)},
    "not finite, and parameters that some lanes use": {
        "model_fn": Sometimes, "find_unused_parameters": True, "dataset_fn": lambda: NotFinite(ODD),
    },
    "fp16": {"model_fn": conv_net, "precision": "fp16", "clip_norm": 0.5},
    "fp16 that does not fit at first": {
        "precision": "fp16", "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW, "ema": 0.9,
        "loss_fn": lambda output, target: 3e3 * functional.cross_entropy(output, target),
    },
    "iterable": {"dataset_fn": Stream},
    "iterable with two workers": {"dataset_fn": Stream, "workers": 2},
    "iterable, shuffled and augmented": {
        "model_fn": conv_net, "dataset_fn": lambda: Stream(augment=True, shuffle=True), "workers": 2, "ema": 0.9,
    },
    "random masks of a collate_fn": {"dataset_fn": lambda: Images(ODD), "collate_fn": masked, "workers": 2},
    "random masks of a collate_fn, iterable": {"dataset_fn": Uneven, "collate_fn": masked},
    "iterable with uneven lanes": {"model_fn": conv_net, "dataset_fn": lambda: Uneven(augment=True)},
    "iterable with uneven lanes, and parameters that some use": {
        "model_fn": Sometimes, "find_unused_parameters": True, "dataset_fn": Uneven, "loss_fn": weighted_loss,
    },
    "iterable up to a step": {
        "dataset_fn": lambda: Stream(shuffle=True), "lanes": 8, "batch_size": 2, "max_steps": 14,
        "schedule": {"name": "cosine", "warmup_steps": 2}, "val_dataset_fn": None,
    },
    "AdamW, sharded": {  # as the case above with samples that are not finite
        "model_fn": conv_net, "dataset_fn": NotFinite, "ema": 0.9, "optimizer": ADAMW, "clip_norm": 0.5,
        "shard_optimizer": True,
    },
    "Muon, sharded": {
        "model_fn": conv_net, "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.1}, "clip_norm": 0.5,
        "shard_optimizer": True, "bucket_mb": 0.001,
    },
    "own loop": {"train_fn": own.train_simply, "model_fn": conv_net},
    "own loop with everything": {
        "train_fn": own.train_with_everything, "model_fn": conv_net, "precision": "bf16",
        "dataset_fn": lambda: Images(ODD, augment=True), "workers": 2, "bucket_mb": 0.001,
    },
    "own loop with two losses": {"train_fn": own.train_with_two_losses, "model_fn": Remembering},
    "own loop with sums, and parameters that some lanes use": {
        "train_fn": own.train_with_sums, "model_fn": Sometimes, "dataset_fn": lambda: Images(ODD),
    },
    "own loop with two networks": {"train_fn": own.train_two_networks, "ema": 0.9},
    "own loop, not finite": {"train_fn": own.train_simply, "dataset_fn": lambda: NotFinite(ODD)},
    "own loop, fp16": {
        "train_fn": own.train_with_everything, "model_fn": conv_net, "precision": "fp16", "max_steps": 9,
    },
    "own loop, iterable": {"train_fn": own.train_simply, "dataset_fn": Uneven},
    "own loop, easy samples first": {
        "train_fn": own.train_simply, "difficulty_fn": lambda sample: float(sample[0].mean()),
        "curriculum": {"start": 0.3, "epochs": 2},
    },
    "own loop, drawn by weights": {"train_fn": own.train_simply, "sample_weights": np.linspace(0, 1, EVEN)},
    "a step that calls parts of the model": {
        "model_fn": Views, "step_fn": two_views, "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW,
        "clip_norm": 0.5, "ema": 0.9,
    },
    "a step in bf16 over a stream with uneven lanes": {
        "model_fn": Views, "step_fn": two_views, "dataset_fn": lambda: Uneven(augment=True), "precision": "bf16",
    },
    "a step with a loss outside the model": {"step_fn": scaled_step, "dataset_fn": lambda: NotFinite(ODD)},
    "a step with a buffer": {"step_fn": ScaledStep(), "model_fn": conv_net, "dataset_fn": lambda: Images(ODD)},
    "a step with sum and count, and parameters that some lanes use": {
        "model_fn": Sometimes, "step_fn": weighted_step, "find_unused_parameters": True, "dataset_fn": Uneven,
    },
    "a step that moves frozen parameters, and an evaluation of its own": {
        "model_fn": Teacher, "step_fn": lambda model, batch: weighted_step(model, batch), "evaluate_fn": measure,
        "dataset_fn": lambda: NotFinite(ODD), "optimizer": ADAMW,
    },
    "two phases": {**GAN, "dataset_fn": lambda: NotFinite(ODD), "clip_norm": 0.5, "ema": 0.9},
    "two phases, one of them at each third step": {
        **GAN, "step_fn": {"critic": critic_step, "generator": every(3, generator_step)},
        "schedule": {"name": "cosine", "warmup_steps": 3}, "dataset_fn": lambda: Images(ODD), "precision": "bf16",
    },
    "two phases over a stream, with parameters of both, and some unused": {
        **GAN, "step_fn": {"both": generator_step, "critic": weighted_gan}, "optimizer_fn": shared_optimizers,
        "dataset_fn": Uneven, "find_unused_parameters": True, "bucket_mb": 0.001,
    },
    "a compiled step": {  # its lanes of less than a full batch run eagerly
        "model_fn": Views, "step_fn": two_views, "dataset_fn": lambda: Images(ODD), "optimizer": ADAMW,
        "step_mode": "compile", "val_dataset_fn": None, "num_epochs": 2,
    },
    "the model's own loss": {
        "model_fn": OwnLoss, "loss_fn": "model", "dataset_fn": lambda: Named(ODD), "val_dataset_fn": lambda: Named(61),
    },
    "everything at once": {
        "model_fn": conv_net, "dataset_fn": lambda: Images(augment=True), "workers": 2, "clip_norm": 0.5, "ema": 0.8,
        "optimizer": ADAMW, "schedule": {"name": "linear", "warmup_steps": 2}, "precision": "bf16",
    },
}  # fmt: skip


def options_of(case: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model_fn": layer_net, "dataset_fn": Images, "val_dataset_fn": lambda: Images(61), "optimizer": SGD,
        "loss_fn": functional.cross_entropy, "metrics": ["accuracy"], "batch_size": BATCH, "lanes": LANES,
        "num_epochs": 3, "threads": 1, "device": "cpu", "check_replicas_every": 5, "log": {"every_steps": 1},
    }  # fmt: skip
    given = CASES[case]
    unused = {"optimizer"} if "train_fn" in given else {"loss_fn"} if "step_fn" in given else set()
    return {**{key: value for key, value in defaults.items() if key not in unused}, **given}


def main(out: Path) -> None:
    gc.freeze()  # every run ends with a full collection, which would visit all objects of torch again
    outcomes = {}
    for case in json.loads(os.environ.get("PACELINE_ONLY", "null")) or CASES:
        options = {**options_of(case), **json.loads(os.environ.get("PACELINE_CASES", "{}"))}
        if "train_fn" in options:
            options.pop("step_mode", None)
        result = Trainer(**options).start()
        events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
        outcomes[case] = {
            "weights": result.weights_sha256,
            "ema": result.ema_sha256,
            "optimizer": result.optimizer_sha256,
            "history": result.history,
            "losses": [event["loss"] for event in events if event["event"] == "step"],
            "values": [event.get("values") for event in events if event["event"] == "step"],
        }
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
