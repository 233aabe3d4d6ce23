"""The identity that two hosts compare before one joins the other: versions, and the config of the run."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from paceline.checkpoint.resume import identity_of
from paceline.config import Config


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts, for identical results and a common protocol."""
    return {"paceline": version("paceline"), "torch": torch.__version__, "python": platform.python_version()}


def fingerprint(config: Config) -> str:
    """A hash that is equal on two hosts if they have the same config."""
    identity = identity_of(config, lanes=0, samples=None, device=torch.device("cpu"))
    return str(identity["config_sha256"])
