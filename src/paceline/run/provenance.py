"""The origin of a run: its machine, its versions, and the git commit of the user's code."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from paceline import __version__

GIT_TIMEOUT_S = 2.0  # a run starts without its commit if git takes longer


def origin_of(folder: Path | None, device: torch.device) -> dict[str, Any]:
    """The fields of `run_started` about the origin; `folder` has the user's code, `device` is that of this rank."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "machine": {"host": socket.gethostname(), "system": platform.system(), "cores": os.cpu_count(), "gpu": gpu},
        "versions": {"paceline": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "commit": commit_of(folder) if folder is not None else None,
    }


def commit_of(folder: Path) -> str | None:
    """The git commit of a folder, with `-dirty` if tracked files have changed since; None outside a repository."""
    command = ["git", "--no-optional-locks", "-C", str(folder), "describe"]
    options = ["--always", "--dirty", "--abbrev=12", "--exclude=*"]  # the commit itself, not the tag before it
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
