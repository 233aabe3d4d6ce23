"""The end of a run: writes its weights and `result.json`, and waits if the disk is full."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.checkpoint.weights import save_weights
from paceline.engine.ema import Ema
from paceline.observe.progress import Progress
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.outcome import write_value
from paceline.system.disk import is_of_full_disk

GIVE_UP_AFTER_S = 600.0
RETRY_S = 1.0


def write_result(
    folder: RunFolder,
    model: torch.nn.Module,
    ema: Ema | None,
    value: Any,
    **facts: Any,
) -> None:
    """Write the weights, the value that `train_fn` returned and `result.json`, in this order. Rank 0 only."""
    facts["weights_sha256"], facts["ema_sha256"] = save_weights(model, folder.weights), None
    if ema is not None:
        with ema.applied():
            facts["ema_sha256"] = save_weights(model, folder.ema)
    if value is not None:
        write_value(folder, value)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(folder.result, {**facts, "versions": versions})


def write_patiently(write: Callable[[], None], progress: Progress) -> None:
    """Write something that must not be lost. Retry while the disk is full or the run folder is missing."""
    deadline = time.monotonic() + GIVE_UP_AFTER_S
    while True:
        try:
            write()
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)  # the launcher restores the folder
            if not (is_missing or is_of_full_disk(str(error))) or time.monotonic() > deadline:
                raise
            progress.phase = "waiting for the run folder" if is_missing else "waiting for free space on the disk"
            progress.batch = (progress.batch or 0) + 1  # progress for the watchdog
            time.sleep(RETRY_S)
        else:
            return
