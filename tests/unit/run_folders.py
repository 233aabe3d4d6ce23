"""Run folders for tests, without any training."""

from __future__ import annotations

from paceline.config import Config
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run


def create_run(config: Config) -> RunFolder:
    """Create the folder of a new run, with its config in it, as a launch that has ended leaves it."""
    with open_run(config, None) as folder:
        return folder
