"""A profile from beginning to end: a short run in a folder of its own, then its figures and what follows from them."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import launch
from paceline.config import Checkpoint, Config, to_plain
from paceline.errors import ConfigError
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import new_folder

if TYPE_CHECKING:
    from paceline.tools.profile.facts import Profile

WARM_UP = 5  # steps: kernels are chosen, states and buckets made
WARM_UP_ON_GPU = 20  # by then a step of several ranks is a CUDA graph, short last steps left out
RARELY = 100  # steps from log point to log point
# What belongs to the real run: its hosts, its past, its end, and the order of its samples.
HERE: dict[str, Any] = {
    "nodes": None, "rendezvous": None, "resume": "never", "max_restarts": 0, "time_limit": None, "curriculum": None,
}  # fmt: skip


def profile(config: Config, steps: int, folder: Path) -> Profile:
    """Time and trace a few steps of a run, which leaves nothing but its traces. `folder` may hold a `.env` file."""
    if config.train_fn is not None:
        raise ConfigError(
            f"train_fn={to_plain(config.train_fn)} is a loop whose steps Paceline does not see; "
            "profile a config with loss_fn, or use torch.profiler in it"
        )
    from paceline.launch.environment import is_main_process
    from paceline.tools.profile import task
    from paceline.world import pick_device

    warm_up = WARM_UP if pick_device(config.device, 0).type == "cpu" else WARM_UP_ON_GPU
    short = shortened(config, warm_up + 2 * steps + 1)  # the last is not measured: it ends the run
    if is_main_process() and short.run_dir is None:
        short.run_dir = new_folder(None, Path("runs") / config.name / "profile")
    found: Profile = launch.start(short, partial(task.profile, warm_up=warm_up, steps=steps), folder).load_value()
    if is_main_process():
        write_json(RunFolder(Path(found.run_dir)).profile / "profile.json", report_of(found))
    return found


def report_of(found: Profile) -> dict[str, Any]:
    """All figures, and the advice, as JSON has them."""
    from paceline.tools.profile.advice import advice_on

    return {**asdict(found), "advice": advice_on(found)}


def shortened(config: Config, steps: int) -> Config:
    """The config of a run of so many steps that saves nothing and tells nobody; all else as it is."""
    length = {"max_steps": steps, "num_epochs": steps}
    # By itself a run tells more in its first seconds than later, where it spends most of its time.
    every_steps = config.log.every_steps or RARELY
    quiet = {
        "log": config.log.model_copy(update={"every_steps": every_steps, "tensorboard": False, "trackers": []}),
        "checkpoint": Checkpoint(every_minutes=None),
        "launcher": "local" if config.launcher == "ray" else config.launcher,
    }
    return config.model_copy(update={**HERE, **length, **quiet})
