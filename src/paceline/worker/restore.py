"""The checkpoint from which a run resumes: found, checked against the config, and restored into model and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.callbacks import Callback
from paceline.checkpoint.files import load
from paceline.checkpoint.interval import Failures
from paceline.checkpoint.resume import check_compatible, named_checkpoint
from paceline.checkpoint.state import CheckpointState, restore_loss, restore_optimizer
from paceline.checkpoint.store import Manifest, Store, verify
from paceline.config import Config
from paceline.engine.ema import Ema
from paceline.engine.outer_state import outer_state
from paceline.engine.step import Stepper
from paceline.observe.events import failed_attempts, rewind
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import reopen
from paceline.worker.callback_states import restore_states
from paceline.worker.context import Context
from paceline.worker.state import TrainState
from paceline.world import World


@dataclass
class LoadedCheckpoint:
    """The checkpoint from which a run resumes."""

    path: Path
    manifest: Manifest
    damaged: list[tuple[Path, str]]  # newer checkpoints, and why they cannot be used
    state: CheckpointState


def find_checkpoint(config: Config, folder: RunFolder, world: World, progress: Progress) -> LoadedCheckpoint | None:
    """Read the newest valid checkpoint of the run, or the one that `resume` names; change no file. All ranks."""
    progress.phase = "reading the checkpoint"

    def choose() -> tuple[Path, Manifest, list[tuple[Path, str]]] | None:
        damaged: list[tuple[Path, str]] = []
        named = named_checkpoint(config.resume)
        found = Store(folder.checkpoints).newest_valid(lambda path, reason: damaged.append((path, reason)))
        if found is None and named is not None:
            found = named, verify(named)
        return (*found, damaged) if found is not None else None

    chosen = world.decide(choose)
    return LoadedCheckpoint(*chosen, load(chosen[0])) if chosen is not None else None


def report_checkpoint(context: Context, checkpoint: LoadedCheckpoint, identity: dict[str, Any]) -> None:
    """Check that the checkpoint belongs to this config, and write an event about it. All ranks."""
    path, manifest = checkpoint.path, checkpoint.manifest
    changes = context.world.decide(lambda: check_compatible(manifest.identity, identity, path))
    context.events.write("resumed", step=manifest.step, checkpoint=str(path), changes=changes)


def restore(
    context: Context, checkpoint: LoadedCheckpoint, stepper: Stepper, callbacks: Sequence[Callback]
) -> TrainState:
    """Restore the optimizer, the loss, the counters, the averages and the callbacks; return the state of the loop."""
    settings, state = stepper.settings, checkpoint.state
    groups = [{**group} for group in stepper.optimizer.param_groups]
    indices = stepper.sharding.mine if stepper.sharding is not None else None
    restore_optimizer(state, stepper.optimizer, checkpoint.path, indices)
    if settings.optimizer_fn is None:  # the config may have changed options of the optimizer, and takes precedence
        for group, configured in zip(stepper.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in configured.items() if key not in ("params", "lr")})
    restore_loss(state, outer_state(settings), checkpoint.path)
    stepper.set_counters(state.values["counters"]["stepper"])
    return restore_loop(context, checkpoint, stepper.ema, callbacks)


def restore_loop(
    context: Context, checkpoint: LoadedCheckpoint, ema: Ema | None, callbacks: Sequence[Callback]
) -> TrainState:
    """Restore the averages of the weights and the callbacks, which both loops have; return the state of the loop."""
    counters = checkpoint.state.values["counters"]
    if ema is not None:
        for name, average in ema.averages().items():
            average.copy_(checkpoint.state.groups["ema"][name])
    for name in restore_states(callbacks, counters.get("callbacks", {})):
        context.warn(f"the checkpoint has the state of a callback {name}, which this run does not have; it is not used")
    return TrainState.from_dict(counters["loop"])


def continue_if_new(state: TrainState, checkpoint: LoadedCheckpoint, folder: RunFolder) -> None:
    """Let a new run that starts from the checkpoint of another run continue where that run finished early."""
    if checkpoint.path.parent != folder.checkpoints:
        state.is_finished, state.finish_requested = False, None


def failures_before(context: Context) -> Failures:
    """The failures of this run in earlier attempts, on rank 0, which decides when to save."""
    ranks, events = context.world.size, context.folder.events
    if not context.events.is_held or context.config.checkpoint.every_minutes != "auto":
        return Failures(ranks)
    return Failures(ranks, *failed_attempts(events))


def begin_attempt(context: Context, checkpoint: LoadedCheckpoint | None) -> None:
    """Change the run folder for the first time, once all ranks have passed all checks. All ranks."""
    folder, events = context.folder, context.events
    context.world.gather_objects(None)  # otherwise rank 0 could start while another rank raises

    def begin() -> None:
        store = Store(folder.checkpoints)
        store.remove_leftovers()
        reopen(folder, context.config)
        if events.is_held:
            rewind(folder.events, checkpoint.manifest.step if checkpoint is not None else -1)
            events.release()
        for path, reason in checkpoint.damaged if checkpoint is not None else []:
            renamed = store.set_aside(path)
            context.warn(f"checkpoint {path.name} cannot be used: {reason}; it is now {renamed.name}")

    context.world.decide(begin)
