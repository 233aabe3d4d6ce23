"""Reads files of a mirrored run from a store: again after an error, compared with their checksum, with progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.store import MANIFEST, STEP_NAME, DamagedCheckpoint, Manifest, parse_manifest
from paceline.errors import ConfigError, PacelineError
from paceline.formatting import size_text
from paceline.mirror.copier import CONFIG, FOLDER
from paceline.mirror.place import MirrorPlace, OnBytes, reason_of
from paceline.run.checked_files import sha256_of_file
from paceline.system.paths import is_url

ATTEMPTS, RETRY_S = 3, 1.0  # for each file
LISTED = 5  # runs in a message
LINE_S = 3.0  # between two lines of progress where there is no terminal
Read = TypeVar("Read")


class Unreadable(PacelineError):
    """A mirror cannot be read."""


def opened(place: str) -> MirrorPlace:
    """The place of a URL or a path."""
    return MirrorPlace(place if is_url(place) else str(Path(place).absolute()), is_new=True)


def sizes_of_run(place: MirrorPlace) -> dict[str, int]:
    """The files of a mirrored run; an error that names the runs below if the place is none."""
    sizes = patiently(place, place.sizes)
    if CONFIG in sizes:
        return sizes
    if not sizes:
        raise ConfigError(f"{place.url} has no files; give a mirrored run, such as s3://bucket/NAME/DATE-TIME")
    runs = sorted(name.removesuffix(f"/{CONFIG}") for name in sizes if name.endswith(f"/{CONFIG}"))
    if runs:
        listed = ", ".join(f"{place.url}/{run}" for run in runs[-LISTED:])
        raise ConfigError(f"{place.url} contains {len(runs)} mirrored runs; give one of them: {listed}")
    raise ConfigError(f"{place.url} is not a mirrored run: it has no {CONFIG}; give one, such as …/NAME/DATE-TIME")


def steps_in(sizes: dict[str, int]) -> list[int]:
    """The steps of the mirrored checkpoints that have a manifest, newest first."""
    parts = [name.split("/") for name in sizes]
    found = [STEP_NAME.fullmatch(each[1]) for each in parts if len(each) == 3 and each[::2] == [FOLDER, MANIFEST]]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def manifest_in(place: MirrorPlace, step: int) -> Manifest:
    """The manifest of a mirrored checkpoint; raises DamagedCheckpoint or Unreadable."""
    name = f"{FOLDER}/step-{step:08d}/{MANIFEST}"
    manifest = parse_manifest(patiently(place, lambda: place.read(name)) or b"")
    if manifest.step != step:
        raise DamagedCheckpoint(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def check_sizes(manifest: Manifest, sizes: dict[str, int]) -> None:
    """Raise DamagedCheckpoint if a file of a mirrored checkpoint is missing or has another size."""
    for file in manifest.files:
        size = sizes.get(f"{FOLDER}/step-{manifest.step:08d}/{file.name}")
        if size is None:
            raise DamagedCheckpoint(f"{file.name} is missing")
        if size != file.size:
            raise DamagedCheckpoint(f"{file.name} has {size} bytes instead of {file.size}")


def json_of(place: MirrorPlace, name: str) -> dict[str, Any]:
    """The content of a JSON file; empty if it is missing or damaged."""
    content = patiently(place, lambda: place.read(name))
    try:
        record = json.loads(content or b"{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def get_file(place: MirrorPlace, name: str, path: Path, on_bytes: OnBytes, sha256: str | None = None) -> None:
    """Download a file, again if its checksum is wrong; raises Unreadable."""

    def get() -> None:
        place.get(name, path, on_bytes)
        if sha256 is not None and sha256_of_file(path) != sha256:
            raise Unreadable(f"{path.name} has a wrong checksum")

    patiently(place, get)


def patiently(place: MirrorPlace, read: Callable[[], Read]) -> Read:
    """Call a function that reads from a store, again after an error; raises Unreadable after the last attempt."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - libraries of stores raise anything
            is_final = isinstance(error, (FileNotFoundError, PermissionError))
            if is_final or attempt == ATTEMPTS:
                is_ours = isinstance(error, Unreadable)
                raise Unreadable(str(error) if is_ours else f"{place.url} cannot be read: {reason_of(error)}") from None
            time.sleep(RETRY_S * attempt)
    raise AssertionError


@contextmanager
def progress(title: str) -> Iterator[OnBytes]:
    """Show the transferred bytes: a bar on a terminal, a line every few seconds elsewhere."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    done, shown = 0, time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def on_bytes(count: int) -> None:
            nonlocal done, shown
            done += count
            bar.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - shown >= LINE_S:
                shown = time.monotonic()
                console.print(f"{title}: {size_text(done)}", markup=False)

        yield on_bytes
