"""Builds the parts of a run, in this order: data, model, settings, step, inputs, loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from paceline.callbacks import BestCheckpoint, Callback, EarlyStopping
from paceline.callbacks.patience import WatchedMetric
from paceline.callbacks.run import set_current_run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture
from paceline.config import Config, Settings
from paceline.data import batches
from paceline.data.curriculum import Curriculum, make_curriculum
from paceline.data.epoch_order import Order, make_order, needs_length, paced
from paceline.data.feed import Feed, make_feeds
from paceline.data.lanes import LaneSampler, RankLanes, StepInputs, steps_of
from paceline.data.seeding import keyed_generators, seed_generators
from paceline.data.sources import is_stream, make_datasets, size_of
from paceline.data.stream_steps import StreamSteps
from paceline.engine.optimizers import left_out_of, make_optimizer
from paceline.engine.outer_state import place_loss, place_steps
from paceline.engine.precision import resolve_precision
from paceline.engine.replica import is_channels_last, make_model, replicate
from paceline.engine.schedule import make_rates
from paceline.engine.step import Stepper
from paceline.errors import ConfigError
from paceline.observe.event_types import TRAIN_PREFIX
from paceline.system.signals import Stop
from paceline.worker.callback_states import check_plain
from paceline.worker.context import Context
from paceline.worker.cycle import StepCycle
from paceline.worker.evaluate import Evaluator
from paceline.worker.loop import Loop
from paceline.worker.rank_run import RankRun, run_facts
from paceline.worker.state import LoopPlan, TrainState
from paceline.world import World

SLOW_AVERAGE = 0.5  # share of the initial weights in the final average, above which there is a warning
SHORT_RUN_STEPS = 20  # runs of at most this length are trials, which get no warning


def use_own_stream(world: World) -> None:
    """Use a separate CUDA stream: graphs cannot be recorded on the default stream of a process."""
    if world.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(world.device))  # type: ignore[no-untyped-call]


def build_data(context: Context) -> tuple[Any, Any | None]:
    """The training and the validation data."""
    context.progress.phase = "building the data set"
    seed_generators(context.config.seed, "data set")
    training, validation = make_datasets(context.config)
    needs_length(context.config, training)
    return training, validation


def build_model(context: Context) -> torch.nn.Module:
    """The user's model, on the CPU."""
    context.progress.phase = "building the model"
    return make_model(context.config)


def build_settings(config: Config, world: World, *, channels_last: bool) -> Settings:
    """The resolved settings: the config with lanes, precision and layout determined, and the loss on the device."""
    return Settings.of(
        config,
        lanes=config.lanes or world.size,
        precision=resolve_precision(config.precision, world.device),
        channels_last=channels_last,
        loss_fn=place_loss(config.loss_fn, world.device),
        step_fn=place_steps(config.step_fn, world.device),
    )


def build_step(
    context: Context, model: torch.nn.Module, training: Any, validation: Any | None, *, through_ddp: bool = False
) -> tuple[Stepper, LoopPlan, Evaluator | None]:
    """The step over the training data, the length of the run, and the evaluation. All ranks.

    With `through_ddp`, the model of a single rank is in DDP, too.
    """
    config, world, progress = context.config, context.world, context.progress
    progress.phase = "building the step"
    feed, validation_feed = make_feeds(training, validation, config, world)
    settings = build_settings(config, world, channels_last=is_channels_last(config, model, feed, world))
    for each in (feed, validation_feed):
        if each is not None:
            each.is_channels_last = settings.channels_last
    replica = replicate(model, settings, world, through_ddp=through_ddp)
    plan = build_plan(context, feed.dataset, settings.lanes)
    progress.phase = "building the optimizer"
    with keyed_generators(config.seed, "optimizer"):
        optimizer = make_optimizer(config, replica.module)
    if left_out := left_out_of(optimizer, replica.module):
        context.warn(
            f"optimizer_fn omits {', '.join(left_out)}, which will not be trained; pass them to an optimizer, or "
            "freeze them with requires_grad_(False) in model_fn"
        )
    stepper = Stepper(
        replica,
        optimizer,
        settings,
        feed,
        rates=make_rates(config, optimizer, plan.total_steps, plan.steps_per_epoch),
        world=world,
        warn=context.warn,
        report=context.report_step_mode,
        total_steps=plan.total_steps,
    )
    if validation_feed is None:
        refuse_without_validation(config)
        return stepper, plan, None
    return stepper, plan, Evaluator(validation_feed, settings, world, replica.forward_state.moving)


def refuse_without_validation(config: Config) -> None:
    """Reject keys that need an evaluation, in a run without validation data."""
    every_steps, schedule = config.evaluate.every_steps, config.schedule
    metrics = {
        f"evaluate.every_steps={every_steps}": every_steps and "val_loss",
        "early_stop": config.early_stop and config.early_stop.metric,
        "checkpoint.best": config.checkpoint.best and config.checkpoint.best.metric,
        "schedule.name=plateau": schedule.name == "plateau" and schedule.option("metric"),
    }
    if keys := [key for key, metric in metrics.items() if metric and not metric.startswith(TRAIN_PREFIX)]:
        raise ConfigError([f"{key} needs validation data; set val_dataset_fn or val_fraction" for key in keys])


def build_plan(context: Context, training: Any, lanes: int) -> LoopPlan:
    """The length of the run and its intervals of logging and comparing; warns of suspicious settings."""
    config = context.config
    total, epochs, per_epoch = length_of(config, training, lanes)
    for text in suspicious_settings(config, total):
        context.warn(text)
    return LoopPlan(
        lanes=lanes,
        total_steps=total,
        epochs=epochs,
        steps_per_epoch=per_epoch,
        log_every_steps=config.log.every_steps,
        check_replicas_every=config.check_replicas_every,
        log_digests=config.log.digests,
        evaluate_every_steps=config.evaluate.every_steps,
        evaluate_every_epochs=config.evaluate.every_epochs or 1,
        ranks_by_loss=config.curriculum is not None and config.curriculum.by == "loss",
    )


def length_of(config: Config, training: Any, lanes: int) -> tuple[int | None, int, int | None]:
    """The number of steps, of epochs and of steps in an epoch; None if an iterable data set determines them."""
    size = size_of(training)
    if size is None:
        return config.max_steps, config.num_epochs, None
    per_epoch = batches.steps_per_epoch(size, config.batch_size, lanes)
    total = min(per_epoch * config.num_epochs, config.max_steps or per_epoch * config.num_epochs)
    return total, -(-total // per_epoch), per_epoch


def suspicious_settings(config: Config, total_steps: int | None) -> list[str]:
    """Warnings about settings that are allowed, but probably not intended in a run of this length (pure)."""
    if total_steps is None:
        return []
    found = []
    if config.max_steps is not None and total_steps < config.max_steps:
        found.append(
            f"max_steps={config.max_steps} is never reached: num_epochs={config.num_epochs} ends the run after "
            f"{total_steps} steps; raise num_epochs"
        )
    if config.ema is not None and total_steps > SHORT_RUN_STEPS and config.ema**total_steps > SLOW_AVERAGE:
        found.append(
            f"ema={config.ema} is slow for {total_steps} steps: {config.ema**total_steps:.0%} of the average will be "
            f"the initial weights; use ema: {1 - float(f'{10 / total_steps:.1g}'):g}"
        )
    return found


def build_callbacks(config: Config) -> list[Callback]:
    """The callbacks of the config, and those for `checkpoint.best` and `early_stop`.

    They are copies where possible, so that another run of this process starts with the state that the user's objects
    have now.
    """
    best, early_stop = config.checkpoint.best, config.early_stop
    own: list[Callback] = [BestCheckpoint(best.metric, best.mode)] if best is not None else []
    if early_stop is not None:
        mode = early_stop.mode or "min"
        own.append(EarlyStopping(early_stop.metric, mode, early_stop.patience, early_stop.min_delta))
    return [*own, *(value() if isinstance(value, type) else _copy_of(value) for value in config.callbacks)]


def _copy_of(callback: Callback) -> Callback:
    try:
        return deepcopy(callback)
    except Exception:  # noqa: BLE001 - anything that cannot be copied, such as an open file
        return callback


def check_watched(watching: Sequence[Any], names: Sequence[str]) -> None:
    """Reject a metric that one of our callbacks or the schedule uses, if an evaluation does not measure it.

    Means over training batches are known after the first of them, so they are checked by the first evaluation.
    """
    for watched in [each.watched for each in watching if isinstance(getattr(each, "watched", None), WatchedMetric)]:
        if not watched.name.startswith(TRAIN_PREFIX):
            watched.check_measured(["train_loss", *names])


def build_loop(
    context: Context, stepper: Stepper, evaluator: Evaluator | None, plan: LoopPlan, saver: Saver, stop: Stop,
    state: TrainState, callbacks: list[Callback],
) -> Loop:  # fmt: skip
    """The managed loop over the inputs of all remaining steps. All ranks."""
    run = RankRun(model=stepper.replica.module, lrs=lambda: stepper.rates.lrs, **run_facts(context, plan, state))
    set_current_run(run)  # before trial calls of the user's functions
    inputs = build_inputs(context, stepper, plan, state)
    context.progress.phase = "trying the evaluation"
    names = evaluator.try_measures(stepper.replica.module) if evaluator is not None else []
    if context.world.is_main and names is not None:  # the same batch for any number of ranks
        check_watched([*callbacks, stepper.rates], names)

    check_plain("the state_dict() of the scheduler of scheduler_fn", stepper.rates.state_dict())

    def capture_with(counters: dict[str, Any]) -> CheckpointState:
        counters = {**counters, "stepper": stepper.counters()}
        loss = stepper.replica.forward_state.of_loss()
        return capture(stepper.replica.module, stepper.optimizer, stepper.ema, counters, stepper.sharding, loss)

    cycle = StepCycle(
        context, stepper.replica, stepper.clock, stepper.guard, plan, saver, stop, state, callbacks, run, capture_with
    )
    return Loop(stepper, inputs, evaluator, plan, state, cycle)


def build_inputs(
    context: Context, stepper: Stepper, plan: LoopPlan, state: TrainState
) -> Callable[[torch.Tensor | None], Iterable[StepInputs]]:
    """A function that returns this rank's inputs of each remaining step, from the samples' losses. All ranks."""
    settings, feed, world, progress = stepper.settings, stepper.feed, context.world, context.progress
    training, lanes = feed.dataset, settings.lanes
    if settings.curriculum is not None:
        progress.phase = "ranking the samples"
    curriculum = make_curriculum(settings, training)
    if is_stream(training):
        return lambda losses: stream_steps(context, settings, training, state)
    if plan.ranks_by_loss:
        Evaluator(feed, settings, world).try_losses(stepper.replica.module)
    total, per_epoch = plan.total_steps, batches.steps_per_epoch(len(training), settings.batch_size, lanes)
    assert total is not None
    progress.phase = "ordering the samples"
    order = make_order(settings, training, world, epoch=state.step // per_epoch)

    def inputs(losses: torch.Tensor | None) -> Iterator[StepInputs]:
        """The inputs of each step; only of the first epoch while the losses for the order are missing."""
        pacing, end = curriculum, total
        if plan.ranks_by_loss and losses is None:
            end = min(per_epoch, total)
        elif settings.curriculum is not None and plan.ranks_by_loss:
            pacing = Curriculum(losses, settings.curriculum, first_epoch=1)
        return steps_in_order(settings, feed, range(state.step, end), total, paced(order, pacing))

    return inputs


def stream_steps(context: Context, settings: Settings, training: Any, state: TrainState) -> StreamSteps:
    """This rank's inputs of each remaining step, over an iterable data set."""
    return StreamSteps(
        training, seed=settings.seed, batch_size=settings.batch_size, lanes=settings.lanes, workers=settings.workers,
        epochs=settings.num_epochs, max_steps=settings.max_steps, step=state.step,
        stream_position=state.stream_position, world=context.world, progress=context.progress, warn=context.warn,
        collate=settings.collate,
    )  # fmt: skip


def steps_in_order(
    settings: Settings, feed: Feed, steps: range, total: int, order: Order, *, is_padded: bool = False
) -> Iterator[StepInputs]:
    """This rank's inputs of these steps of a run of `total` steps, over a data set with a length."""
    world, lanes, size = feed.world, settings.lanes, len(feed.dataset)
    sampler = partial(
        LaneSampler,
        seed=settings.seed,
        size=size,
        batch_size=settings.batch_size,
        rank_lanes=RankLanes(lanes, world.size, world.rank),
        steps=steps,
        order=order,
        is_padded=is_padded,
    )
    per_epoch = batches.steps_per_epoch(size, settings.batch_size, lanes)
    return steps_of(feed.lanes(sampler), steps_per_epoch=per_epoch, total_steps=total)
