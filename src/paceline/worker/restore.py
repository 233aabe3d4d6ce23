"""The checkpoint that a run goes on from: found, checked against the config, and put back into model and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.callbacks import Callback
from paceline.checkpoint.files import load
from paceline.checkpoint.resume import check_compatible, named_checkpoint
from paceline.checkpoint.state import CheckpointState, restore_loss, restore_optimizer
from paceline.checkpoint.store import Manifest, Store, verify
from paceline.config import Config
from paceline.engine.step import Stepper
from paceline.observe.events import Events, rewind
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import reopen
from paceline.worker.state import TrainState
from paceline.world import World


@dataclass
class LoadedCheckpoint:
    """The checkpoint that a run goes on from."""

    path: Path
    manifest: Manifest
    damaged: list[tuple[Path, str]]  # newer ones, and why they cannot be used
    state: CheckpointState


def find_checkpoint(config: Config, folder: RunFolder, world: World, progress: Progress) -> LoadedCheckpoint | None:
    """The newest valid checkpoint of the run, or the one that `resume` names, read. Changes nothing. All ranks."""
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


def report_checkpoint(past: LoadedCheckpoint, identity: dict[str, Any], world: World, events: Events) -> None:
    """Check that the checkpoint belongs to this config, and write an event about it. All ranks."""
    changes = world.decide(lambda: check_compatible(past.manifest.identity, identity, past.path))
    events.write("resumed", step=past.manifest.step, checkpoint=str(past.path), changes=changes)


def restore(past: LoadedCheckpoint, stepper: Stepper, callbacks: Sequence[Callback]) -> TrainState:
    """Restore the optimizer, the averages, the counters and the callbacks; the state of the loop."""
    config = stepper.settings
    groups = [{**group} for group in stepper.optimizer.param_groups]
    places = stepper.sharding.mine if stepper.sharding is not None else None
    restore_optimizer(past.state, stepper.optimizer, past.path, places)
    if config.optimizer_fn is None:  # what the config says of the optimizer may have changed; the config is right
        for group, here in zip(stepper.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in here.items() if key not in ("params", "lr")})
    if stepper.ema is not None:
        for name, average in stepper.ema.averages().items():
            average.copy_(past.state.groups["ema"][name])
    restore_loss(past.state, config.loss_fn, past.path)
    counters = past.state.values["counters"]
    stepper.set_counters(counters["stepper"])
    saved = counters.get("callbacks", [])
    if len(saved) == len(callbacks):  # another number: the callbacks were changed, and begin as they are
        for callback, content in zip(callbacks, saved, strict=True):
            callback.load_state_dict(content)
    return TrainState.from_dict(counters["loop"])


def begin_attempt(
    past: LoadedCheckpoint | None, config: Config, folder: RunFolder, world: World, events: Events
) -> None:
    """Change the run folder for the first time, once all ranks have passed all checks. All ranks."""
    world.gather_objects(None)  # or rank 0 could begin while another one refuses

    def begin() -> None:
        store = Store(folder.checkpoints)
        store.remove_leftovers()
        reopen(folder, config)
        if events.is_held:
            rewind(folder.events, past.manifest.step if past is not None else -1)
            events.release()
        for path, reason in past.damaged if past is not None else []:
            text = f"checkpoint {path.name} cannot be used: {reason}; it is now {store.set_aside(path).name}"
            events.write("warning", text=text)

    world.decide(begin)
