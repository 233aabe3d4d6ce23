"""Profiles a config: a short run in its own run folder, then a report of its figures with advice."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import launch
from paceline.config import Checkpoint, Config, to_plain
from paceline.errors import ConfigError
from paceline.run.atomic_files import write_json
from paceline.run.job import Task
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import new_folder

if TYPE_CHECKING:
    from paceline.tools.profile.facts import Profile

WARM_UP = 5  # steps, in which kernels are chosen and optimizer states and buckets are created
WARM_UP_ON_GPU = 20  # by then the full steps of several ranks are CUDA graphs
LOG_EVERY_STEPS = 100
# The keys that belong to the real run: its hosts, its checkpoints, its end, and the order of its samples.
OF_REAL_RUN: dict[str, Any] = {
    "nodes": None, "rendezvous": None, "resume": "never", "max_restarts": 0, "time_limit": None, "curriculum": None,
}  # fmt: skip


def profile(config: Config, steps: int, folder: Path) -> Profile:
    """Time and trace a few steps in a separate run folder. `folder` may contain a `.env` file."""
    if config.train_fn is not None:
        raise ConfigError(
            f"train_fn={to_plain(config.train_fn)} is your own loop, whose steps cannot be profiled; "
            "profile a config with loss_fn, or use torch.profiler in it"
        )
    from paceline.launch.environment import is_main_process
    from paceline.world import pick_device

    warm_up = WARM_UP if pick_device(config.device, 0).type == "cpu" else WARM_UP_ON_GPU
    short = shortened(config, warm_up + 2 * steps + 1)  # the last step is not measured: it ends the run
    if is_main_process() and short.run_dir is None:
        short.run_dir = new_folder(None, Path("runs") / config.name / "profile")
    task = Task("paceline.tools.profile.task:profile", {"warm_up": warm_up, "steps": steps})
    found: Profile = launch.start(short, task, folder).load_value()
    if is_main_process():
        write_json(RunFolder(Path(found.run_dir)).profile / "profile.json", report_of(found))
    return found


def report_of(found: Profile) -> dict[str, Any]:
    """All figures and the advice, ready for JSON."""
    from paceline.tools.profile.advice import advice_on

    return {**asdict(found), "advice": advice_on(found)}


def shortened(config: Config, steps: int) -> Config:
    """The config for `steps` steps without checkpoints, trackers and TensorBoard; otherwise unchanged."""
    length = {"max_steps": steps, "num_epochs": steps}
    # By default a run logs more often in its first seconds, which are not typical of the run.
    every_steps = config.log.every_steps or LOG_EVERY_STEPS
    quiet = {
        "log": config.log.model_copy(update={"every_steps": every_steps, "tensorboard": False, "trackers": []}),
        "checkpoint": Checkpoint(every_minutes=None),
        "launcher": "local" if config.launcher == "ray" else config.launcher,
    }
    return config.model_copy(update={**OF_REAL_RUN, **length, **quiet})
