"""The start of both loops with checkpoints: the last checkpoint, the events, the data and the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paceline.checkpoint.resume import identity_of
from paceline.checkpoint.state import restore_weights
from paceline.config import Config
from paceline.data.scaler import fit_scalers
from paceline.data.sources import size_of
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.worker.build import build_data, build_model
from paceline.worker.context import Context, open_context
from paceline.worker.restore import LoadedCheckpoint, find_checkpoint, report_checkpoint
from paceline.world import World


class PreparedRun(NamedTuple):
    """The parts of a run from which its step and its loop are built."""

    context: Context
    checkpoint: LoadedCheckpoint | None  # from which the run resumes
    identity: dict[str, Any]
    model: torch.nn.Module  # on the CPU, with the weights of the checkpoint
    training: Any
    validation: Any | None


def prepare_run(config: Config, folder: RunFolder, world: World, progress: Progress) -> PreparedRun:
    """Read the checkpoint, build the data and the model, and restore the weights; change no file. All ranks."""
    checkpoint = find_checkpoint(config, folder, world, progress)
    # Until all checks have passed, the folder of an earlier attempt is not changed.
    context = open_context(config, folder, world, progress, is_held=folder.events.exists())
    training, validation = build_data(context)
    model = build_model(context)
    identity = identity_of(config, lanes=config.lanes or world.size, samples=size_of(training), device=world.device)
    if checkpoint is not None:
        progress.phase = "restoring the checkpoint"
        report_checkpoint(context, checkpoint, identity)
        restore_weights(checkpoint.state, model, checkpoint.path)
    else:
        fit_scalers(model, training, config.seed, progress, config.collate)
    return PreparedRun(context, checkpoint, identity, model, training, validation)
