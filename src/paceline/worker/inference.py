"""Tasks of the ranks with a trained model: evaluate it, or predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.weights import load_weights
from paceline.config import Config
from paceline.data.feed import make_feeds
from paceline.data.sources import is_stream, original_indices
from paceline.engine.replica import is_channels_last, make_model, place_model
from paceline.errors import DataError
from paceline.observe.events import Events
from paceline.observe.progress import Progress
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.outcome import Predictions, write_value
from paceline.worker.build import build_data, build_settings
from paceline.worker.context import Context
from paceline.worker.evaluate import Evaluator
from paceline.worker.mistakes import explaining_mistakes
from paceline.world import World


def evaluate(
    config: Config, folder: RunFolder, world: World, progress: Progress, *, weights: Path, is_whole: bool
) -> None:
    """Write the mean of the loss and of each metric as the job's value, and to a file. All ranks."""
    context = _context(config, folder, world, progress)
    with explaining_mistakes(config, progress):
        _, metrics = _apply("measure", context, weights, is_whole)
    if world.is_main:
        write_json(folder.metrics, {"metrics": metrics, "weights": str(weights)})
        write_value(folder, metrics)


def predict(
    config: Config, folder: RunFolder, world: World, progress: Progress, *, weights: Path, is_whole: bool
) -> None:
    """Write the model's outputs, in the order of the data set, as the job's value. All ranks."""
    context = _context(config, folder, world, progress)
    with explaining_mistakes(config, progress):
        dataset, outputs = _apply("predict", context, weights, is_whole)
    if world.is_main:
        indices = np.asarray(original_indices(dataset, range(len(dataset))))
        write_value(folder, Predictions(indices, outputs))


def _context(config: Config, folder: RunFolder, world: World, progress: Progress) -> Context:
    """A context without the event `run_started`."""
    return Context(config, folder, world, Events(folder.events if world.is_main else None), progress)


def _apply(what: str, context: Context, weights: Path, is_whole: bool) -> tuple[Any, Any]:
    """Return the data set and the result of the evaluator's method `what` on it. All ranks."""
    config, world, events, progress = context.config, context.world, context.events, context.progress
    training, validation = build_data(context)
    # Data that was passed for this purpose is used completely; the default is the run's validation data.
    dataset = training if is_whole else validation
    if dataset is None:
        raise DataError("the run has no validation data; pass the data to use")
    if is_stream(dataset):
        raise DataError(
            f"dataset_fn returned a {type(dataset).__name__}, which cannot be evaluated or predicted in order; "
            "return a map-style data set, one with __len__ and __getitem__"
        )
    progress.phase = "loading the model"
    model = make_model(config)
    load_weights(model, weights)
    progress.phase = "evaluating"
    feed, _ = make_feeds(dataset, None, config, world)
    settings = build_settings(config, world, channels_last=is_channels_last(config, model, feed, world))
    feed.is_channels_last = settings.channels_last
    model = place_model(model, settings, world.device)
    method: Any = getattr(Evaluator(feed, settings, world), what)
    value = method(model, lambda done, total: events.write_sometimes("evaluating", batch=done, batches=total))
    events.write("run_finished")
    events.close()
    return dataset, value
