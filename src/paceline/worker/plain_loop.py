"""A `train_fn` without `run`: called with the model in DDP and two loaders; the ranks are compared afterwards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from paceline.checkpoint.weights import save_weights
from paceline.config import Config
from paceline.data.batches import even_part
from paceline.data.epoch_loader import epoch_loader
from paceline.data.epoch_order import make_order
from paceline.data.seeding import seed_generators
from paceline.data.sources import is_stream
from paceline.data.stream_loader import StreamLoader
from paceline.engine.digest import find_difference
from paceline.engine.replica import PlainModel, Replica
from paceline.errors import ReplicasDiffer
from paceline.worker.context import Context
from paceline.worker.result import write_patiently
from paceline.world import is_joined


def run_plain_loop(context: Context, replica: Replica | PlainModel, training: Any, validation: Any | None) -> Any:
    """Call the user's `train_fn` and return its value. All ranks."""
    config, world, events, progress = context.config, context.world, context.events, context.progress
    progress.phase = "building the loaders"

    def on_training_batch(epoch: int, batch: int, batches: int) -> None:
        note_training_batch(epoch, batch, batches, len(even_part(len(training), batches, batch)))

    def note_training_batch(epoch: int, batch: int, batches: int | None, samples: int) -> None:
        progress.phase, progress.epoch, progress.batch = "training", epoch, batch
        progress.step = (progress.step or 0) + 1
        progress.samples += samples
        events.write_sometimes("progress", phase="training", epoch=epoch + 1, batch=batch, batches=batches)

    def on_validation_batch(epoch: int, batch: int, batches: int) -> None:
        progress.phase, progress.batch = "validating", batch
        events.write_sometimes(
            "progress", phase="validating", epoch=(progress.epoch or epoch) + 1, batch=batch, batches=batches
        )

    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "workers": config.workers,
        "world": world,
        "collate": config.collate,
    }
    train_loader: Any
    if is_stream(training):
        train_loader = StreamLoader(
            training,
            on_batch=lambda epoch, batch, samples: note_training_batch(epoch, batch, None, samples),
            warn=context.warn,
            **shared,
        )
    else:
        train_loader = epoch_loader(
            training,
            order=make_order(config, training, world),
            what="the training data",
            on_batch=on_training_batch,
            **shared,
        )
    val_loader = None
    if validation is not None:
        val_loader = epoch_loader(
            validation,
            order=None,
            what=f"the validation data{_of_split(config)}",
            on_batch=on_validation_batch,
            **shared,
        )
    # Without workers, augmentation draws from this process's generators: they must differ between ranks.
    seed_generators(config.seed, "rank", world.rank)
    progress.phase = "training"
    model = replica.module if isinstance(replica, PlainModel) else replica
    return config.function("train_fn")(model, train_loader, val_loader, world.device, config.num_epochs)


def compare_ranks(context: Context, model: torch.nn.Module, trained: Collection[str]) -> None:
    """Stop a run whose ranks ended `train_fn` with different weights, and keep those of rank 0. All ranks.

    `trained` names the parameters that were trainable before. Buffers may differ, as in DDP.
    """
    world, progress, folder = context.world, context.progress, context.folder
    if world.size == 1:
        return
    if not is_joined():
        text = (
            "train_fn has destroyed the process group, so the weights of the ranks are not compared; rank 0's are saved"
        )
        context.warn(text)
        return
    progress.phase = "comparing the weights of the ranks"
    found = find_difference(model, trained, world)
    if found is None:
        return

    def keep() -> None:
        save_weights(model, folder.rank_0_weights)

    world.decide(
        lambda: write_patiently(keep, progress)
    )  # no rank fails, which would end the others, before it is written
    cause = (
        "model.module(…) bypasses DDP's sum of gradients, so call model(…); "
        f"rank 0's weights are in {folder.rank_0_weights}"
    )
    raise ReplicasDiffer(*found, progress.step or 0, cause)


def _of_split(config: Config) -> str:
    """The origin of the validation data, if it is a part of the training data."""
    is_given = config.val_df is not None or config.val_dataset_fn is not None
    return "" if is_given else f" (val_fraction={config.val_fraction}; 0 leaves it out)"
