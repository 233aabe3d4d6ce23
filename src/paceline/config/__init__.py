"""The typed config: what a run is, from YAML, the command line or Python, with every mistake reported at once.

Nothing here knows about devices, processes or the environment.
"""

from paceline.config.build import build, override, resolve_tables
from paceline.config.checks import describe, unknown_names
from paceline.config.resolved import Settings
from paceline.config.schema import (
    FUNCTION_KEYS,
    Augmentation,
    Best,
    Checkpoint,
    Config,
    Log,
    Pacing,
    Schedule,
)
from paceline.config.yaml import dump_yaml, read_yaml, to_plain

__all__ = [
    "FUNCTION_KEYS",
    "Augmentation",
    "Best",
    "Checkpoint",
    "Config",
    "Log",
    "Pacing",
    "Schedule",
    "Settings",
    "build",
    "describe",
    "dump_yaml",
    "override",
    "read_yaml",
    "resolve_tables",
    "to_plain",
    "unknown_names",
]
