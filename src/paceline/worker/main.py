"""One rank of a run, from start to end, in the order of execution. Read this file to learn the system.

A rank uses only the contents of its job, so the user's script is never imported again.
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from paceline.callbacks.run import set_current_run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture, capture_own
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data.feed import make_feeds
from paceline.data.scaler import fit_scalers
from paceline.data.seeding import seed_generators
from paceline.data.workers import end_workers
from paceline.engine.digest import sha256_of_optimizers
from paceline.engine.ema import Ema
from paceline.engine.gradients import explaining_errors
from paceline.engine.replica import replicate
from paceline.errors import ConfigError
from paceline.observe import failures
from paceline.observe.progress import Progress
from paceline.observe.rank_log import failed_line, warning_line
from paceline.observe.watchdog import watching
from paceline.run import job
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import reopen
from paceline.system.processes import DONE, die_with_parent
from paceline.system.signals import Stop, StopAgreed
from paceline.worker.build import (
    build_callbacks,
    build_data,
    build_loop,
    build_model,
    build_settings,
    build_step,
    use_own_stream,
)
from paceline.worker.build_own import build_own_loaders, build_own_loop, build_own_step, restore_own
from paceline.worker.context import Context, open_context
from paceline.worker.cycle import StepCycle
from paceline.worker.loop import Loop
from paceline.worker.mistakes import explaining_mistakes
from paceline.worker.own_run import OwnRun
from paceline.worker.plain_loop import compare_ranks, run_plain_loop
from paceline.worker.prepare import prepare_run
from paceline.worker.restore import begin_attempt, continue_if_new, failures_before, restore
from paceline.worker.result import write_patiently, write_result
from paceline.worker.state import TrainState
from paceline.world import World, join, world_size


def main() -> None:
    """Run one rank: load the job, join the process group, run the task; write a failure file for the launcher."""
    job_path, began, parent = Path(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
    store = Path(sys.argv[2]) if sys.argv[2] else None  # without it, the ranks join at MASTER_ADDR
    die_with_parent(parent)
    rank = int(os.environ["RANK"])
    warnings.showwarning = _show_with_rank(rank)
    folder, progress = RunFolder(job_path.parent), Progress(began=began)
    try:
        config, task = job.load(job_path)
        with watching(config, folder, rank, world_size(), progress), join(config, store) as world:
            task(config, folder, world, progress)
            end_workers()
    except BaseException as error:  # noqa: BLE001 - also sys.exit and Ctrl-C: anything that ends a rank is reported
        captured = failures.capture(error, rank=rank, progress=progress, folder=folder)
        failures.write(captured, folder, spare=store.parent if store else None)
        print(failed_line(rank), file=sys.stderr)
        traceback.print_exc()
        _end(1)  # without exit handlers, which could wait for other ranks that wait for this one
    # As Python does at exit: wait for threads, then run the exit handlers of libraries.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _end(DONE)


def _end(code: int) -> NoReturn:
    """End the process immediately: threads of process groups abort it while the interpreter shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Build everything and train, in the user's own loop or in the managed one. All ranks."""
    with explaining_mistakes(config, progress):
        if config.keeps_state:
            train_with_checkpoints(config, folder, world, progress)
        else:
            train_in_plain_loop(open_context(config, folder, world, progress))


def train_with_checkpoints(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Train in the managed loop, or in a `train_fn` with `run`. All ranks."""
    stop = Stop(deadline=progress.began + config.time_limit if config.time_limit is not None else None)
    try:
        with stop.listening():
            (train_managed if config.train_fn is None else train_in_own_loop)(config, folder, world, progress, stop)
    finally:
        set_current_run(None)


def train_in_plain_loop(context: Context) -> None:
    """Call a `train_fn` without `run`, with the model in DDP and the loaders; rank 0 writes the result. All ranks."""
    config, world, progress = context.config, context.world, context.progress
    if config.resume == "auto":
        context.warn("train_fn has no parameter `run`, so its state was not saved: it starts from the beginning")
    if world.is_main:
        reopen(context.folder, config)
    training, validation = build_data(context)
    model = build_model(context)
    fit_scalers(model, training, config.seed, progress, config.collate)
    progress.phase = "building the replica"
    replica = replicate(model, build_settings(config, world, channels_last=config.channels_last is True), world)
    began = time.perf_counter()
    trained = {name for name, parameter in replica.module.named_parameters() if parameter.requires_grad}
    value = run_plain_loop(context, replica, training, validation)
    seconds = time.perf_counter() - began
    compare_ranks(context, replica.module, trained)
    progress.phase = "writing the result"
    write = partial(
        write_result, context.folder, replica.module, None, value, optimizer_sha256=None, metrics={}, history=[],
        step=progress.step or 0, epoch=(progress.epoch or 0) + 1, world_size=world.size, lanes=world.size,
        seconds=round(seconds, 3), samples=progress.samples,
    )  # fmt: skip
    if world.is_main:
        write_patiently(write, progress)
    epoch = None if progress.epoch is None else progress.epoch + 1
    context.events.write("run_finished", step=progress.step, epoch=epoch, metrics={})
    context.events.close()


def train_managed(config: Config, folder: RunFolder, world: World, progress: Progress, stop: Stop) -> None:
    """Train from the last checkpoint, or from the beginning, to the end or to an agreed stop. All ranks."""
    use_own_stream(world)
    context, checkpoint, identity, model, training, validation = prepare_run(config, folder, world, progress)
    stepper, plan, evaluator = build_step(context, model, training, validation)
    state, callbacks = TrainState(), build_callbacks(config)
    if checkpoint is not None:
        progress.phase = "restoring the checkpoint"
        state = restore(context, checkpoint, stepper, callbacks)
        continue_if_new(state, checkpoint, folder)
    saver = Saver(
        Store(folder.checkpoints), config.checkpoint, identity, world, context.events, stepper.sharding,
        failures_before(context),
    )  # fmt: skip
    loss = stepper.replica.forward_state.of_loss()
    present = capture(stepper.replica.module, stepper.optimizer, stepper.ema, {}, stepper.sharding, loss)
    check_space(context, present, stepper.parameters)
    loop = build_loop(context, stepper, evaluator, plan, saver, stop, state, callbacks)
    begin_attempt(context, checkpoint)
    del checkpoint, model

    reason = loop.run()
    is_saved = loop.cycle.save()
    progress.phase = "writing the result"
    with ExitStack() as ending:  # also if a callback raises an error in on_stop
        ending.callback(context.events.close)
        if reason:
            ending.callback(write_stop, context, loop.cycle, is_saved=is_saved)
        else:
            ending.callback(finish_managed_run, context, loop, identity)
        loop.finish(reason)


def finish_managed_run(context: Context, loop: Loop, identity: dict[str, Any]) -> None:
    """Write the result of a complete run of the managed loop. All ranks."""
    stepper = loop.stepper
    stepper.replica.share_buffers()
    finish_run(
        context, loop.cycle, identity, lanes=stepper.settings.lanes, ema=stepper.ema,
        optimizer_sha256=stepper.optimizer_sha256(),
    )  # fmt: skip


def train_in_own_loop(config: Config, folder: RunFolder, world: World, progress: Progress, stop: Stop) -> None:
    """Call a `train_fn` with `run`, from the last checkpoint or from the beginning. All ranks."""
    context, checkpoint, identity, model, training, validation = prepare_run(config, folder, world, progress)
    feed, _ = make_feeds(training, None, config, world)
    step, callbacks = build_own_step(context, model, feed), build_callbacks(config)
    restored = restore_own(context, checkpoint, step, callbacks)
    if checkpoint is not None:
        continue_if_new(restored[0], checkpoint, folder)
    saver = Saver(
        Store(folder.checkpoints), config.checkpoint, identity, world, context.events,
        failures=failures_before(context),
    )  # fmt: skip
    present = checkpoint.state if checkpoint is not None else capture_own(step.replica.module, {}, step.ema, {})
    check_space(context, present, step.replica.module.parameters())
    run = build_own_loop(context, step, feed, saver, stop, callbacks, restored)
    loaders = build_own_loaders(context, run.loop, validation)
    begin_attempt(context, checkpoint)
    del checkpoint, model

    reason, value = call_train_fn(context, run, *loaders)
    is_saved = run.loop.save()
    progress.phase = "writing the result"
    with ExitStack() as ending:  # also if a callback raises an error in on_stop
        ending.callback(context.events.close)
        if reason:
            ending.callback(write_stop, context, run.loop.cycle, is_saved=is_saved)
        else:
            ending.callback(finish_own_run, context, run, identity, value)
        run.loop.cycle.call("on_stop", run.stop_requested if reason else None)


def finish_own_run(context: Context, run: OwnRun, identity: dict[str, Any], value: Any) -> None:
    """Compare the weights of the ranks, and write the result of a complete run of the user's own loop. All ranks."""
    step, tracked = run.loop.step, run.loop.tracked
    for module in (run.model, *tracked.modules()):
        compare_ranks(context, module, {name for name, _ in module.named_parameters()})
    finish_run(
        context, run.loop.cycle, identity, lanes=step.settings.lanes, ema=step.ema,
        optimizer_sha256=sha256_of_optimizers(tracked.optimizers()), value=value,
    )  # fmt: skip


def call_train_fn(context: Context, run: OwnRun, train_loader: Any, val_loader: Any) -> tuple[int, Any]:
    """Call the user's `train_fn`; return 0 or the number of the reason to stop, and its return value. All ranks."""
    config, loop = context.config, run.loop
    loop.cycle.start()
    seed_generators(config.seed, "train_fn")
    context.progress.phase = "training"
    try:
        with explaining_errors(loop.step.settings.precision), loop.checking_optimizers():
            value = config.function("train_fn")(
                run.model, train_loader, val_loader, context.world.device, config.num_epochs, run=run
            )
        loop.finish()
    except StopAgreed as agreed:
        return int(agreed.args[0]), None
    finally:
        context.progress.batch = None
    return 0, value


def check_space(context: Context, state: CheckpointState, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise if the disk has no space for two checkpoints like `state`. All ranks."""
    folder, size = context.folder, state.nbytes
    if not any(state.groups.get(name) for name in ("optimizer", "tracked")):
        # The first step creates the state of an optimizer: two numbers for each weight in most of them.
        size += 2 * sum(parameter.nbytes for parameter in parameters)

    def check() -> None:
        leftovers = [file for path in Store(folder.checkpoints).leftovers() for file in path.rglob("*")]
        free = shutil.disk_usage(folder.path).free + sum(file.stat().st_size for file in leftovers)
        if free < 2 * size:
            raise ConfigError(
                f"run_dir={folder.path} has {free / 1e6:,.0f} MB free, but two checkpoints need "
                f"{2 * size / 1e6:,.0f} MB; free some space, or choose another folder with --run-dir"
            )

    context.world.decide(check)


def write_stop(context: Context, cycle: StepCycle, *, is_saved: bool) -> None:
    """Write an event and a file with the step and the reason of the stop."""
    facts = {"step": cycle.state.step, "reason": cycle.run.stop_requested, "is_saved": is_saved}
    context.events.write("run_stopped", **facts)
    if context.world.is_main:
        write_json(context.folder.stopped, facts)


def finish_run(
    context: Context, cycle: StepCycle, identity: dict[str, Any], *, lanes: int, ema: Ema | None,
    optimizer_sha256: str | None, value: Any = None,
) -> None:  # fmt: skip
    """Write the weights, the value that `train_fn` returned and the result of a complete run. All ranks."""
    state, world, epochs = cycle.state, context.world, len(cycle.state.history)
    write = partial(
        write_result, context.folder, cycle.module, ema, value, optimizer_sha256=optimizer_sha256,
        metrics=state.metrics, history=state.history, step=state.step, epoch=epochs, world_size=world.size,
        lanes=lanes, seconds=round(state.seconds, 3), samples=state.samples,
    )  # fmt: skip
    if world.is_main:
        write_patiently(write, context.progress)
    early_end = {"reason": cycle.run.finish_requested} if state.is_finished else {}
    context.events.write(
        "run_finished", step=state.step, epoch=epochs, metrics=state.metrics,
        config={**identity["config"], "lanes": lanes}, **early_end,
    )  # fmt: skip


def _show_with_rank(rank: int) -> Callable[..., None]:
    """A replacement of `warnings.showwarning` that prints lines in a form that the launcher recognises in the logs."""

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
