"""Builds the user's own loop with `run`: the step, the loop around it, the loaders and the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.callbacks import Callback
from paceline.callbacks.run import set_current_run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture_own, tracked_states
from paceline.data import batches
from paceline.data.curriculum import make_curriculum
from paceline.data.epoch_order import make_order, paced
from paceline.data.feed import Feed, make_feeds
from paceline.data.lanes import LaneSampler, StepInputs
from paceline.data.sources import is_stream
from paceline.engine.clock import DeviceClock, PhaseClock
from paceline.engine.nonfinite import Guard
from paceline.engine.own_step import OwnStep
from paceline.engine.replica import BareReplica, check_trainable, place_model
from paceline.system.signals import Stop
from paceline.worker.build import build_plan, build_settings, steps_in_order, stream_steps
from paceline.worker.callback_states import check_plain, copied
from paceline.worker.context import Context
from paceline.worker.cycle import StepCycle
from paceline.worker.epoch_inputs import EpochInputs
from paceline.worker.logged_values import LoggedValues
from paceline.worker.own_loaders import TrainLoader, ValLoader
from paceline.worker.own_loop import OwnLoop
from paceline.worker.own_run import OwnRun
from paceline.worker.rank_run import run_facts
from paceline.worker.restore import LoadedCheckpoint, restore_loop
from paceline.worker.state import TrainState
from paceline.worker.tracked import Tracked


def build_own_step(context: Context, model: torch.nn.Module, feed: Feed) -> OwnStep:
    """The step of the user's own loop. All ranks."""
    config, world = context.config, context.world
    context.progress.phase = "building the step"
    settings = build_settings(config, world, channels_last=config.channels_last is True)
    feed.is_channels_last = settings.channels_last
    check_trainable(model, settings, world)
    replica = BareReplica(place_model(model, settings, world.device), world)
    guard = None
    if settings.nan != "off" or settings.precision == "fp16":
        guard = Guard(replica.forward_state, settings, world, on_bad=context.warn, original=feed.original_indices)
    clock = DeviceClock(is_alone=world.size == 1) if world.device.type == "cuda" else PhaseClock()
    return OwnStep(replica, settings, guard, clock, world)


def restore_own(
    context: Context, checkpoint: LoadedCheckpoint | None, step: OwnStep, callbacks: list[Callback]
) -> tuple[TrainState, Tracked, dict[str, Any]]:
    """The state of the loop, the tracked objects and `run.state`, from a checkpoint or for a new run."""
    if checkpoint is None:
        return TrainState(), Tracked({}, None, context.warn_once, step.replica.module), {}
    state, counters = checkpoint.state, checkpoint.state.values["counters"]
    if step.guard is not None:
        step.guard.set_counters(counters["stepper"])
    train_state = restore_loop(context, checkpoint, step.ema, callbacks)
    tracked = Tracked(
        tracked_states(state), checkpoint.path, context.warn_once, step.replica.module, frozen=counters.get("frozen"),
        epochs=counters.get("tracked_epochs"), epoch=train_state.open_epoch,
    )  # fmt: skip
    return train_state, tracked, counters["own"]


def build_own_loop(
    context: Context, step: OwnStep, feed: Feed, saver: Saver, stop: Stop, callbacks: list[Callback],
    restored: tuple[TrainState, Tracked, dict[str, Any]],
) -> OwnRun:  # fmt: skip
    """The loop around the user's code, and the `run` that is passed to it. All ranks."""
    state, tracked, own = restored
    world, settings, module = context.world, step.settings, step.replica.module
    plan = build_plan(context, feed.dataset, settings.lanes)
    logged = LoggedValues(world)

    def capture_with(counters: dict[str, Any]) -> CheckpointState:
        if run.state:
            check_plain("run.state", run.state)
        counters = {
            **counters,
            "stepper": step.counters(),
            "own": copied("run.state", run.state),
            "frozen": tracked.frozen(),
            "tracked_epochs": {**tracked.epochs},
        }
        states = tracked.states()
        if world.size > 1:
            warn_of_different(context, tracked.digests())
        return capture_own(module, states, step.ema, counters)

    run = OwnRun(model=module, lrs=tracked.learning_rates, state=own, **run_facts(context, plan, state))
    set_current_run(run)
    cycle = StepCycle(
        context, step.replica, step.clock, step.guard, plan, saver, stop, state, callbacks, run, capture_with, logged
    )
    per_epoch, order = None, None
    curriculum = make_curriculum(settings, feed.dataset)
    if not is_stream(feed.dataset):
        per_epoch = batches.steps_per_epoch(len(feed.dataset), settings.batch_size, settings.lanes)
        order = paced(make_order(settings, feed.dataset, world, epoch=state.step // per_epoch), curriculum)

    def inputs_from(first: int, end: int) -> Iterator[StepInputs]:
        if order is None:
            return iter(stream_steps(context, settings, feed.dataset, state))
        return steps_in_order(settings, feed, range(first, end), end, order, is_padded=True)

    limit = plan.total_steps if settings.max_steps is not None else None
    inputs = EpochInputs(inputs_from, state, steps_per_epoch=per_epoch, total_steps=plan.total_steps, limit=limit)
    run.loop = OwnLoop(context, step, feed, plan, state, cycle, tracked, logged, inputs)
    return run


def warn_of_different(context: Context, digests: dict[str, int]) -> None:
    """Warn about tracked objects whose states differ between the ranks. All ranks."""
    of_ranks = context.world.gather_objects(digests)
    for name in (name for name in of_ranks[0] if any(each.get(name) != of_ranks[0][name] for each in of_ranks)):
        context.warn_once(
            f"the state of {name}, passed to run.track, differs between the ranks; checkpoints contain that of rank 0, "
            "so a resumed run gives different weights"
        )


def build_own_loaders(context: Context, loop: OwnLoop, validation: Any | None) -> tuple[TrainLoader, ValLoader | None]:
    """The loaders of training and validation."""
    feed, settings = loop.feed, loop.step.settings
    train_loader = TrainLoader(feed.dataset, settings.batch_size, batches_per_epoch(loop), loop.batches)
    if validation is None:
        return train_loader, None
    # Every rank has a batch, for any number of ranks that the lanes allow.
    size = min(settings.batch_size, max(len(validation) // settings.lanes, 1))
    config = context.config.model_copy(update={"batch_size": size})
    validation_feed, _ = make_feeds(validation, None, config, context.world)
    validation_feed.is_channels_last = settings.channels_last
    return train_loader, ValLoader(validation_feed, loop.step, context.events, context.progress, loop.close_left_step)


def batches_per_epoch(loop: OwnLoop) -> int | None:
    """The number of batches of this rank in an epoch; None for an iterable data set."""
    per_epoch, settings = loop.inputs.steps_per_epoch, loop.step.settings
    if per_epoch is None:
        return None
    sampler = LaneSampler(
        seed=0, size=len(loop.feed.dataset), batch_size=settings.batch_size, steps=range(0),
        rank_lanes=loop.step.rank_lanes,
    )  # fmt: skip
    return (per_epoch - 1) * loop.step.rank_lanes.most + sampler.lanes_in(per_epoch - 1)
