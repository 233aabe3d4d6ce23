"""Exports a trained model in a format that other programs can read.

The exported model is loaded again and compared with the trained model before the folder is renamed to its final name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.system.paths import problem_with
from paceline.tools.export import card, hf, traced, weights
from paceline.tools.export.task import ExportTask

if TYPE_CHECKING:
    from paceline.results.load import TrainedRun

# Each writes its files, compares, and returns the Python code that loads them, for the card.
FORMATS: dict[str, Callable[[ExportTask], str]] = {
    "safetensors": weights.write_safetensors,
    "torch": traced.write_torch,
    "onnx": traced.write_onnx,
    "hf": hf.write_hf,
}


def export(
    run: TrainedRun,
    format: str,
    to: Path | str,
    data: Path | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a trained model into the new folder `to`, with a card and the config of the run; returns the folder.

    Models are traced and compared with samples of the run's data, or of `data`, a CSV or Parquet file. `on_progress` is
    called with the name of each part that takes time.
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format} is unknown; use {', '.join(FORMATS)}")
    if problem := problem_with(to):
        raise ConfigError(f"to={to} {problem}")
    with _published(Path(to)) as folder:
        task = ExportTask(run, folder, data, on_progress)
        usage = FORMATS[format](task)
        shutil.copyfile(RunFolder(run.run_dir).config, folder / "config.yaml")
        write_text(folder / "README.md", card.text(run, sha256_of(run.model.state_dict()), usage, task.notes))
    return Path(to)


@contextmanager
def _published(to: Path) -> Iterator[Path]:
    """A folder to write into, which is renamed to `to` at the end, or removed after an error."""
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to} already exists and is not an empty folder; choose another name")
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to {to} cannot be created: {error.strerror}; choose another folder") from None
    try:
        yield partial
        partial.replace(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
