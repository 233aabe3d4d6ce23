"""The checkpoint that a run goes on from: found, checked against the config, and put back into model and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.state import State, load, put_loss, put_optimizer
from paceline.checkpoint.store import Manifest, Store, verify
from paceline.config import Config
from paceline.loop import Fit
from paceline.progress import Progress
from paceline.resume import check_fit, checkpoint_in
from paceline.run_folder import RunFolder
from paceline.step import Stepper
from paceline.telemetry.events import Events, rewind
from paceline.world import World


@dataclass
class Found:
    """The checkpoint that a run goes on from."""

    path: Path
    manifest: Manifest
    damaged: list[str]  # what was wrong with newer ones
    state: State


def find_past(config: Config, folder: RunFolder, world: World, progress: Progress) -> Found | None:
    """The newest valid checkpoint of the run, or the one that `resume` names, read. All ranks."""
    progress.phase = "reading the checkpoint"
    store, damaged = Store(folder.checkpoints), list[str]()

    def choose() -> tuple[Path, Manifest, list[str]] | None:
        store.clean()
        named = checkpoint_in(config.resume)
        found = store.newest_valid(damaged.append)
        if found is None and named is not None:
            found = named, verify(named)
        rewind(folder.events, found[1].step if found is not None else -1)
        return (*found, damaged) if found is not None else None

    chosen = world.decide(choose)
    return Found(*chosen, load(chosen[0])) if chosen is not None else None


def tell_past(past: Found, identity: dict[str, Any], world: World, events: Events) -> None:
    """Check that the checkpoint belongs to this config, and say what goes on. All ranks."""
    changes = world.decide(lambda: check_fit(past.manifest.identity, identity, past.path))
    for text in past.damaged:
        events.write("warning", text=text)
    events.write("resumed", step=past.manifest.step, checkpoint=str(past.path), changes=changes)


def restore(past: Found, config: Config, stepper: Stepper) -> Fit:
    """Give the optimizer, the averages and the counters what the checkpoint holds."""
    settings = [{**group} for group in stepper.optimizer.param_groups]
    places = stepper.sharding.mine if stepper.sharding is not None else None
    put_optimizer(past.state, stepper.optimizer, past.path, places)
    if config.optimizer_fn is None:  # what the config says of the optimizer may have changed; the config is right
        for group, here in zip(stepper.optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in here.items() if key not in ("params", "lr")})
    if stepper.ema is not None:
        for name, average in stepper.ema.averages().items():
            average.copy_(past.state.groups["ema"][name])
    put_loss(past.state, config.loss_fn, past.path)
    counters = past.state.rest["counters"]
    stepper.set_counters(counters["stepper"])
    return Fit.from_dict(counters["loop"])
