"""The typed config: all settings of a user, from YAML, the command line or Python.

Reports all mistakes of a config at once. Must not depend on torch, devices, processes or the environment.
"""

from paceline.config.answers import answers_to
from paceline.config.build import build, override, resolve_tables
from paceline.config.json_schema import json_schema
from paceline.config.keys import EXECUTION_KEYS, FUNCTION_KEYS
from paceline.config.messages import problems_of
from paceline.config.resolved import Settings
from paceline.config.schema import Config
from paceline.config.sections import Augmentation, Best, Checkpoint, Log, Pacing, Schedule
from paceline.config.written import Origin, in_one_line
from paceline.config.yaml import dotted_items, dump_yaml, read_yaml, to_plain

__all__ = [
    "EXECUTION_KEYS",
    "FUNCTION_KEYS",
    "Augmentation",
    "Best",
    "Checkpoint",
    "Config",
    "Log",
    "Origin",
    "Pacing",
    "Schedule",
    "Settings",
    "answers_to",
    "build",
    "dotted_items",
    "dump_yaml",
    "in_one_line",
    "json_schema",
    "override",
    "problems_of",
    "read_yaml",
    "resolve_tables",
    "to_plain",
]
