"""Who starts the ranks and watches them. Knows nothing of models or data."""

from __future__ import annotations

from pathlib import Path

from paceline.config import Config
from paceline.job import Task
from paceline.launch.environment import load_dotenv, pick_launcher
from paceline.result import Outcome


def start(config: Config, task: Task, folder: Path) -> Outcome:
    """Do a task with the launcher that the config or the environment asks for; `folder` may hold a `.env` file."""
    launcher = pick_launcher(config.launcher)
    load_dotenv(folder)
    if launcher == "torchrun":
        from paceline.launch import torchrun

        return torchrun.start(config, task)
    from paceline.launch import local

    return local.start(config, task)
