"""The folder that several users or nodes share: data sets, models, prepared data, compiled code."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def in_home(*parts: str) -> Path:
    """A path in $PACELINE_HOME, or in `shared_data` of the working folder if the variable is not set."""
    return Path(
        os.environ.get("PACELINE_HOME") or "shared_data", *parts
    ).expanduser()  # the value may come from a .env file, which no shell expands


def use_compiler_cache(key: str, *, default: str) -> None:
    """Keep what torch.compile makes in a folder of this name in $PACELINE_HOME, unless the user has chosen a folder.

    `default` is torch's own folder, which torch also sets as the variable.
    """
    if os.environ.get(COMPILER_CACHE) not in (None, default):
        return
    folder = in_home("compiled", key).absolute()
    if any(map(str.isspace, str(folder))):  # where torch's command for g++ would end the name
        return
    with suppress(OSError):  # where nothing can be written, torch's own folder is used
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ[COMPILER_CACHE] = str(folder)
