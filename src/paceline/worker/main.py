"""What happens inside one rank, in order: read it to know the system.

A rank knows only what stands in its job, so the user's script is never imported again.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from paceline.checkpoint.resume import identity_of
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import capture, put_weights
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data import batches
from paceline.data.curriculum import Curriculum, make_curriculum
from paceline.data.feed import Feed, make_feeds
from paceline.data.loader import LaneSampler, StepInputs, steps_of
from paceline.data.scaler import fit_scalers
from paceline.data.seeding import keyed_generators, seed_generators
from paceline.data.sources import is_stream, make_datasets, size_of
from paceline.data.stream import StreamSteps
from paceline.engine.optimizers import lr_at, make_optimizer
from paceline.engine.precision import resolve
from paceline.engine.replica import Replica, Single, make_model, place_loss, replicate, settle_layout
from paceline.engine.step import Stepper
from paceline.errors import ConfigError
from paceline.observe import failures
from paceline.observe.events import VERSION, Events
from paceline.observe.lines import failed_line, warning_line
from paceline.observe.progress import Progress
from paceline.observe.watchdog import watching
from paceline.run import job
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import reopen
from paceline.run.provenance import origin_of
from paceline.system.exit_codes import DONE
from paceline.system.parent import die_with_parent
from paceline.system.signals import Stop, describe
from paceline.worker.evaluate import Evaluator
from paceline.worker.loop import Loop, LoopPlan, TrainState
from paceline.worker.own_loop import compare_ranks, run_own_loop
from paceline.worker.restore import find_checkpoint, report_checkpoint, restore, take_up
from paceline.worker.result import write_patiently, write_result
from paceline.world import World, join, world_size

MUCH = 0.5  # of an average, for the weights at the beginning
A_TRIAL = 20  # steps: whoever takes fewer does not ask what they are good for


def main() -> None:
    """One rank of a local run: load the job, join the others, do it; leave a failure where the launcher looks."""
    job_path, began, parent = Path(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
    store = Path(sys.argv[2]) if sys.argv[2] else None  # without it, the ranks meet at MASTER_ADDR
    die_with_parent(parent)
    rank = int(os.environ["RANK"])
    warnings.showwarning = _show_with_rank(rank)
    folder, progress = RunFolder(job_path.parent), Progress(began=began)
    try:
        config, task = job.load(job_path)
        with watching(config, folder, rank, world_size(), progress), join(config, store) as world:
            task(config, folder, world, progress)
    except BaseException as error:  # noqa: BLE001 - also sys.exit and Ctrl-C: whatever ends a rank is told
        captured = failures.capture(error, rank=rank, progress=progress, folder=folder)
        failures.write(captured, folder, spare=store.parent if store else None)
        print(failed_line(rank), file=sys.stderr)
        traceback.print_exc()
        _end(1)  # without what the program left for its end, which could wait for neighbours that wait for this rank
    # What Python does at its end: wait for threads, then run what libraries have left to be done.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _end(DONE)


def _end(code: int) -> NoReturn:
    """End the process at once: the end of the interpreter is where threads of process groups abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Build everything and train, in the user's own loop or in the managed one. All ranks."""
    if config.train_fn is not None:
        train_by_own_loop(config, folder, world, progress)
        return
    stop = Stop(deadline=progress.began + config.time_limit if config.time_limit is not None else None)
    with stop.listening():
        train_managed(config, folder, world, progress, stop)


def train_by_own_loop(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Hand the model and the loaders to `train_fn`; rank 0 writes the result. All ranks."""
    events = open_events(config, folder, world)
    if config.resume == "auto":
        events.write("warning", text="Paceline keeps no checkpoints for train_fn: it starts from the beginning")
    if world.is_main:
        reopen(folder, config)
    training, validation = build_data(config, progress)
    model = build_model(config, progress)
    fit_scalers(model, training, config.seed, progress)
    progress.phase = "building the replica"
    replica = replicate(model, config, world)
    began = time.perf_counter()
    trained = {name for name, parameter in replica.module.named_parameters() if parameter.requires_grad}
    value = run_own_loop(config, replica, training, validation, world, events, progress)
    seconds = time.perf_counter() - began
    compare_ranks(replica.module, trained, folder, world, events, progress)
    progress.phase = "writing the result"
    write = partial(
        write_result, folder, replica.module, None, value, optimizer_sha256=None, metrics={}, history=[],
        step=progress.step or 0, epoch=(progress.epoch or 0) + 1, world_size=world.size, lanes=world.size,
        seconds=round(seconds, 3), samples=progress.samples,
    )  # fmt: skip
    if world.is_main:
        write_patiently(write, progress)
    epoch = None if progress.epoch is None else progress.epoch + 1
    events.write("run_finished", step=progress.step, epoch=epoch, metrics={})
    events.close()


def train_managed(config: Config, folder: RunFolder, world: World, progress: Progress, stop: Stop) -> None:
    """Go on from the last checkpoint, if there is one, to the end or to an agreed stop. All ranks."""
    lanes = config.lanes or world.size
    asked, config = config, settle_device(config, world)
    past = find_checkpoint(config, folder, world, progress)
    # Until all checks have passed, the folder of an earlier run stays as it is.
    events = open_events(config, folder, world, is_held=folder.events.exists())
    say_if_bits_differ(config, world, events)
    training, validation = build_data(config, progress)
    model = build_model(config, progress)
    identity = identity_of(config, lanes=lanes, samples=size_of(training), device=world.device)
    fit = TrainState()
    if past is not None:
        progress.phase = "restoring the checkpoint"
        report_checkpoint(past, identity, world, events)
        put_weights(past.state, model, past.path)
    else:
        fit_scalers(model, training, config.seed, progress)
    config, stepper, plan, evaluation = build_step(config, model, training, validation, lanes, world, events, progress)
    if past is not None:
        progress.phase = "restoring the checkpoint"
        fit = restore(past, config, stepper)
    saver = Saver(Store(folder.checkpoints), config.checkpoint, identity, world, events, stepper.sharding)
    check_space(folder, stepper, world)
    loop = build_loop(config, stepper, evaluation, plan, saver, stop, fit, world, events, progress)
    take_up(past, asked, folder, world, events)
    del past, model

    reason = loop.run()
    is_saved = loop.save()
    progress.phase = "writing the result"
    if reason:
        leave_stop(folder, fit, reason, is_saved, world, events)
    else:
        stepper.replica.share_buffers()
        optimizer_sha256 = stepper.optimizer_sha256()
        write = partial(
            write_result, folder, stepper.replica.module, stepper.ema, None, optimizer_sha256=optimizer_sha256,
            metrics=fit.metrics, history=fit.history, step=fit.step, epoch=len(fit.history),
            world_size=world.size, lanes=lanes, seconds=round(fit.seconds, 3), samples=fit.samples,
        )  # fmt: skip
        if world.is_main:
            write_patiently(write, progress)
        settled = {**identity["config"], "lanes": lanes}
        events.write("run_finished", step=fit.step, epoch=len(fit.history), metrics=fit.metrics, config=settled)
    events.close()


# --- what every run begins with --------------------------------------------------------------------------------------


def open_events(config: Config, folder: RunFolder, world: World, *, is_held: bool = False) -> Events:
    """The events of the run, which begin with who is there."""
    events = Events(folder.events if world.is_main else None, is_held=is_held)
    if world.is_main:
        events.write(
            "run_started", version=VERSION, name=config.name, run_dir=str(folder.path), seed=config.seed,
            world_size=world.size, lanes=config.lanes or world.size, device=world.device.type, backend=world.backend,
            **origin_of(config.folder, world.device),
        )  # fmt: skip
        for text in world.warnings:
            events.write("warning", text=text)
    return events


def build_data(config: Config, progress: Progress) -> tuple[Any, Any | None]:
    """The training and the validation data."""
    progress.phase = "building the data set"
    seed_generators(config.seed, "data set")
    return make_datasets(config)


def build_model(config: Config, progress: Progress) -> torch.nn.Module:
    """The user's model, on the CPU."""
    progress.phase = "building the model"
    return make_model(config)


def say_if_bits_differ(config: Config, world: World, events: Events) -> None:
    """One line if this number of ranks cannot give the bits that others give."""
    if config.exact and world.size & (world.size - 1):
        events.write(
            "warning",
            text=f"{world.size} ranks add up in an order of their own: the weights agree with other numbers of ranks "
            "to rounding, not to the last bit; a power of two keeps the bits",
        )
    if config.exact and config.step_mode == "compile":
        events.write(
            "warning",
            text="step_mode=compile: the compiler rounds differently for one process and for several, so the weights "
            "agree with other numbers of processes to rounding, not to the last bit",
        )


def check_space(folder: RunFolder, stepper: Stepper, world: World) -> None:
    """Refuse to begin where two checkpoints have no room. All ranks."""
    loss = stepper.replica.forward_state.of_loss()
    state = capture(stepper.replica.module, stepper.optimizer, stepper.ema, {}, stepper.sharding, loss)
    size = state.size
    if not stepper.optimizer.state:  # comes with the first step: two numbers a weight, as most optimizers keep
        size += 2 * sum(parameter.nbytes for parameter in stepper.parameters)

    def check() -> None:
        leftovers = [file for path in Store(folder.checkpoints).leftovers() for file in path.rglob("*")]
        free = shutil.disk_usage(folder.path).free + sum(file.stat().st_size for file in leftovers)
        if free < 2 * size:
            raise ConfigError(
                f"run_dir={folder.path} has {free / 1e6:,.0f} MB free, two checkpoints need {2 * size / 1e6:,.0f} MB; "
                "make room, or choose another folder with --run-dir"
            )

    world.decide(check)


def leave_stop(folder: RunFolder, fit: TrainState, reason: int, is_saved: bool, world: World, events: Events) -> None:
    """Say where and why the run stopped, for people and for the launcher."""
    facts = {"step": fit.step, "reason": describe(reason), "is_saved": is_saved}
    events.write("run_stopped", **facts)
    if world.is_main:
        write_json(folder.stopped, facts)


# --- the managed loop ------------------------------------------------------------------------------------------------


def settle_device(config: Config, world: World) -> Config:
    """The config with its precision decided and a loss of the run's own, and the device ready for steps."""
    if world.device.type == "cuda":  # a CUDA graph cannot be recorded on the stream that a process begins with
        torch.cuda.set_stream(torch.cuda.Stream(world.device))  # type: ignore[no-untyped-call]
    settled = {
        "precision": resolve(config.precision, world.device),
        "loss_fn": place_loss(config.loss_fn, world.device),
    }
    return config.model_copy(update=settled)


def build_step(
    config: Config, model: torch.nn.Module, training: Any, validation: Any | None, lanes: int, world: World,
    events: Events, progress: Progress,
) -> tuple[Config, Stepper, LoopPlan, Feed | None]:  # fmt: skip
    """The step over the training data, with the layout decided, and what feeds an evaluation. All ranks."""
    progress.phase = "building the step"
    feed, evaluation = make_feeds(training, validation, config, world)
    config = settle_layout(config, model, feed, world)
    for each in (feed, evaluation):
        if each is not None:
            each.by_channels = config.channels_last is True
    stepper, plan = build_stepper(config, replicate(model, config, world), feed, lanes, world, events, progress)
    return config, stepper, plan, evaluation


def build_stepper(
    config: Config, replica: Replica | Single, feed: Feed, lanes: int, world: World, events: Events, progress: Progress
) -> tuple[Stepper, LoopPlan]:
    """The step with its optimizer, and how many steps the run has. All ranks."""
    total, epochs = length_of(config, feed.dataset, lanes)
    for text in surprises(config, total):
        events.write("warning", text=text)
    plan = LoopPlan(
        total_steps=total,
        epochs=epochs,
        log_every_steps=config.log.every_steps,
        check_replicas_every=config.check_replicas_every,
        log_digests=config.log.digests,
        best=config.checkpoint.best,
        ranks_by_loss=config.curriculum is not None and config.curriculum.by == "loss",
    )
    progress.phase = "building the optimizer"
    with keyed_generators(config.seed, "optimizer"):
        optimizer = make_optimizer(config, replica.module)
    stepper = Stepper(
        replica,
        optimizer,
        config,
        feed,
        lr_factor=lambda step: lr_at(step, 1.0, config.schedule, plan.total_steps),
        lanes_per_rank=lanes // world.size,
        world=world,
        say=lambda text: events.write("warning", text=text),
    )
    return stepper, plan


def length_of(config: Config, training: Any, lanes: int) -> tuple[int | None, int]:
    """The steps of the run, if they are known, and the epochs."""
    size = size_of(training)
    if size is not None:
        per_epoch = batches.steps_per_epoch(size, config.batch_size, lanes)
        total = min(per_epoch * config.num_epochs, config.max_steps or per_epoch * config.num_epochs)
        return total, -(-total // per_epoch)
    if config.max_steps is None and config.schedule.name != "constant":
        raise ConfigError(
            f"schedule.name={config.schedule.name} must know where the run ends, which an iterable data set does not "
            "tell; set max_steps, or use schedule.name: constant"
        )
    return config.max_steps, config.num_epochs


def surprises(config: Config, total_steps: int | None) -> list[str]:
    """What is allowed, but hardly meant, in a run of so many steps (pure)."""
    if total_steps is None:
        return []
    found = []
    if config.max_steps is not None and total_steps < config.max_steps:
        found.append(
            f"max_steps={config.max_steps} is not reached: num_epochs={config.num_epochs} ends the run after "
            f"{total_steps} steps; raise num_epochs"
        )
    if config.ema is not None and total_steps > A_TRIAL and config.ema**total_steps > MUCH:
        found.append(
            f"ema={config.ema} is slow for {total_steps} steps: {config.ema**total_steps:.0%} of the average will be "
            f"the weights at the beginning; use ema: {1 - float(f'{10 / total_steps:.1g}'):g}"
        )
    return found


def build_turns(
    config: Config, stepper: Stepper, plan: LoopPlan, fit: TrainState, world: World, events: Events, progress: Progress
) -> Callable[[torch.Tensor | None], Iterable[StepInputs]]:
    """The lanes of this rank, step by step, from where the run is; a function of the samples' losses. All ranks."""
    feed, training, lanes = stepper.feed, stepper.feed.dataset, stepper.lanes_per_rank * world.size
    if config.curriculum is not None:
        progress.phase = "ranking the samples"
    curriculum = make_curriculum(config, training)
    if is_stream(training):
        return lambda losses: StreamSteps(
            training, seed=config.seed, batch_size=config.batch_size, lanes=lanes, workers=config.workers,
            epochs=config.num_epochs, max_steps=config.max_steps, step=fit.step, mark=fit.mark, world=world,
            progress=progress, tell=lambda text: events.write("warning", text=text),
        )  # fmt: skip
    if plan.ranks_by_loss:
        Evaluator(feed, config, world).try_losses(stepper.replica.module)
    total, per_epoch = plan.total_steps, batches.steps_per_epoch(len(training), config.batch_size, lanes)
    assert total is not None

    def turns(losses: torch.Tensor | None) -> Iterator[StepInputs]:
        """Without losses that rank the samples, no further than the first epoch."""
        paced, end = curriculum, total
        if plan.ranks_by_loss and losses is None:
            end = min(per_epoch, total)
        elif config.curriculum is not None and plan.ranks_by_loss:
            paced = Curriculum(losses, config.curriculum, first_epoch=1)
        sampler = partial(
            LaneSampler,
            seed=config.seed,
            size=len(training),
            batch_size=config.batch_size,
            lanes=lanes,
            steps=range(fit.step, end),
            ridden=batches.lanes_of(world.rank, world.size, lanes),
            curriculum=paced,
        )
        return steps_of(feed.lanes(sampler), steps_per_epoch=per_epoch, total_steps=total)

    return turns


def build_loop(
    config: Config, stepper: Stepper, evaluation: Feed | None, plan: LoopPlan, saver: Saver, stop: Stop,
    fit: TrainState, world: World, events: Events, progress: Progress,
) -> Loop:  # fmt: skip
    """Wire the data and the evaluation into the managed loop. All ranks."""
    turns = build_turns(config, stepper, plan, fit, world, events, progress)
    evaluator = (
        Evaluator(evaluation, config, world, stepper.replica.forward_state.moving) if evaluation is not None else None
    )
    if evaluator is not None:
        progress.phase = "trying the evaluation"
        evaluator.try_measures(stepper.replica.module)
    return Loop(
        stepper=stepper, turns=turns, evaluator=evaluator, plan=plan, saver=saver, stop=stop, fit=fit, world=world,
        events=events, progress=progress,
    )  # fmt: skip


def _show_with_rank(rank: int) -> Callable[..., None]:
    """Warnings as one line each, in a form that the launcher finds in the logs."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        print(
            warning_line(rank, f"{category.__name__}: {message} ({filename}:{lineno})"),
            file=sys.stderr,
            flush=True,
        )

    return show


if __name__ == "__main__":
    main()
