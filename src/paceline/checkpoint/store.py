"""The folder of a run's checkpoints: names, manifests, atomic publishing, verification and retention.

A checkpoint is written into a hidden folder. Its manifest, which lists the size and checksum of every other file, is
written last; then the folder is renamed. So a checkpoint under its final name is complete, unless the disk has damaged
it. Metrics that are measured later are added by a new manifest, which replaces the old one atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from paceline.errors import CheckpointsDamaged
from paceline.run import checked_files
from paceline.run.atomic_files import sync_folder
from paceline.run.checked_files import FileRecord

FORMAT = 1
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
DAMAGED_PREFIX = "damaged-"


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be used; the message is the reason."""


class Identity(TypedDict, total=False):
    """The settings that determine the results of a run; they are compared when the run is resumed."""

    config: dict[str, Any]
    config_sha256: str
    lanes: Annotated[int, Field(ge=1)]
    samples: int | None
    threads: int | None
    device: str
    versions: dict[str, str]


def _check_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity unchanged, with fields of later versions; raise ValueError if a type is wrong."""
    TypeAdapter(Identity).validate_python(identity, strict=True)
    return identity


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest.json."""

    __pydantic_config__ = ConfigDict(strict=True)  # when a manifest is read

    step: Annotated[int, Field(ge=0, le=2**53)]
    files: list[FileRecord]
    identity: Annotated[dict[str, Any], AfterValidator(_check_identity)]  # an Identity
    metrics: dict[str, float | None] = field(default_factory=dict)  # None if the value is not finite
    time: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    format: int = FORMAT

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        """Return the manifest as JSON, with the checksum of its own content."""
        content = asdict(self)
        return json.dumps({**content, "sha256": content_sha256(content)}, indent=1)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder; raise DamagedCheckpoint if it cannot be used."""
    try:
        return parse_manifest((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {type(error).__name__}") from None


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in the text of a manifest.json; raise DamagedCheckpoint if it cannot be used."""
    try:
        content = json.loads(text.decode())
        sha256 = content.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {type(error).__name__}") from None
    if sha256 != content_sha256(content):
        raise DamagedCheckpoint(f"{MANIFEST} has changed since it was written")
    if content.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST} has format {content.get('format')}; this version reads {FORMAT}")
    try:
        return _manifest_adapter().validate_json(json.dumps(content))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise DamagedCheckpoint(f"{MANIFEST} has an invalid value of {where}") from None


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def verify(path: Path) -> Manifest:
    """Compare all files with the manifest; raise DamagedCheckpoint for the first whose size or checksum differs."""
    manifest = read_manifest(path)
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
            if size != file.size:
                raise DamagedCheckpoint(f"{file.name} has {size} bytes instead of {file.size}")
            if checked_files.sha256_of_file(path / file.name) != file.sha256:
                raise DamagedCheckpoint(f"{file.name} has a wrong checksum")
        except OSError as error:
            raise DamagedCheckpoint(f"{file.name} cannot be read: {error.strerror}") from None
    return manifest


class Store:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """The folder of a published checkpoint."""
        return self.folder / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """The folder into which all ranks write a checkpoint before it is published."""
        return self.folder / f".step-{step:08d}.partial"

    def paths(self) -> list[Path]:
        """The folders of all published checkpoints, newest first."""
        found = [(int(match[1]), path) for path in self._entries() if (match := STEP_NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def damaged_paths(self) -> list[Path]:
        """The folders of the checkpoints that `set_aside` has renamed."""
        return sorted((path for path in self._entries() if path.name.startswith(DAMAGED_PREFIX)), reverse=True)

    def newest_step(self) -> int:
        """The step of the newest checkpoint, from its name; -1 if there is none."""
        return max((step_of(path) for path in self.paths()), default=-1)

    def newest_valid(self, on_damaged: Callable[[Path, str], None]) -> tuple[Path, Manifest] | None:
        """Return the newest checkpoint that can be used; call `on_damaged` with each newer one and the reason.

        Changes no file. Raises CheckpointsDamaged if checkpoints exist and all are damaged, because a run must not
        silently start from the beginning.
        """
        damaged = []
        for path in self.paths():
            try:
                return path, verify(path)
            except DamagedCheckpoint as reason:
                damaged.append(f"{path.name} ({reason})")
                on_damaged(path, str(reason))
        if damaged := [*damaged, *(path.name for path in self.damaged_paths())]:
            raise CheckpointsDamaged(
                f"none of the checkpoints in {self.folder} can be used: {', '.join(damaged)}; "
                "start a new run with --resume never, or resume from another checkpoint with --resume PATH"
            )
        return None

    def publish(
        self, step: int, written: Sequence[FileRecord], identity: dict[str, Any], metrics: Mapping[str, float]
    ) -> Path:
        """Write the manifest of a partial checkpoint and rename its folder, so that a crash leaves no incomplete one.

        A valid checkpoint of the same step is kept, because replacing it would leave a moment without either. Its
        metrics are added if it was saved before they were measured.
        """
        partial, path = self.partial(step), self.path(step)
        measured = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if path.exists():  # the run was resumed at this step
            try:
                found = verify(path)
            except DamagedCheckpoint:
                self.set_aside(path)
            else:
                self.discard(step)
                if measured and not found.metrics:
                    self._replace_manifest(path, replace(found, metrics=measured))
                return path
        for file in written:  # by all ranks, possibly on other machines
            if (size := (partial / file.name).stat().st_size) != file.size:
                raise OSError(f"{partial / file.name} has {size} bytes instead of {file.size}")
        manifest = Manifest(
            step=step,
            files=sorted(written, key=lambda file: file.name),
            identity=identity,
            metrics=measured,
            time=round(time.time(), 3),
        )
        checked_files.write(partial / MANIFEST, [manifest.to_json().encode()])
        sync_folder(partial)
        partial.rename(path)
        sync_folder(self.folder)
        return path

    def _replace_manifest(self, path: Path, manifest: Manifest) -> None:
        """Replace a manifest atomically."""
        new = path / f".{MANIFEST}"
        checked_files.write(new, [manifest.to_json().encode()])
        new.rename(path / MANIFEST)
        sync_folder(path)

    def discard(self, step: int) -> None:
        """Remove the partial folder of a checkpoint that could not be written."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """The folders that killed runs were writing or removing. Correct only while no process writes here."""
        return [path for path in self._entries() if path.name.endswith(".partial")]

    def remove_leftovers(self) -> None:
        """Remove the folders that killed runs left."""
        for path in self.leftovers():
            shutil.rmtree(path, ignore_errors=True)

    def retain(self, keep: int, best: tuple[str, str] | None) -> None:
        """Remove all checkpoints except the newest `keep` and the best. Call this after a new one is published."""
        kept = {*self.paths()[:keep]}
        if best is not None:
            kept.add(self.best(*best) or Path())
        for path in self.paths():
            if path not in kept:
                # Hidden first: if the process is killed here, no incomplete folder looks like a checkpoint.
                hidden = path.with_name(f".{path.name}.partial")
                with suppress(OSError):
                    path.rename(hidden)
                    shutil.rmtree(hidden)

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the best value of a metric, the first of several; None if none has a finite value."""
        values: dict[Path, float] = {}
        for path in reversed(self.paths()):
            with suppress(DamagedCheckpoint):
                value = read_manifest(path).metrics.get(metric)
                if value is not None:
                    values[path] = value
        if not values:
            return None
        return (min if mode == "min" else max)(values, key=lambda path: values[path])

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint so that it is kept but not used; return its new path."""
        stem = f"{DAMAGED_PREFIX}{path.name}"
        aside = next(
            path.with_name(name)
            for name in (stem, *(f"{stem}-{n}" for n in range(2, 10_000)))
            if not path.with_name(name).exists()
        )
        return path.rename(aside)

    def _entries(self) -> Iterable[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []


def step_of(path: Path) -> int:
    """The step of a published checkpoint, from its name."""
    match = STEP_NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def content_sha256(content: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
