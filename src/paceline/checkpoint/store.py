"""The folder of a run's checkpoints: names, manifests, atomic publishing, verification, and which ones are kept.

A checkpoint is written into a folder with a dot before its name. Its manifest, which holds the size and checksum of
every other file, comes last; then the folder gets its name. So what has a name is whole, unless a disk has lost it.
Metrics that are measured later come with a new manifest, which takes the place of the old one in a single move.
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
from paceline.run import tensor_files
from paceline.run.tensor_files import Written

FORMAT = 1
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")
DAMAGED = "damaged-"


class Damaged(Exception):
    """Why a checkpoint cannot be used, in one sentence."""


class Identity(TypedDict, total=False):
    """What decides what a run computes, and must fit when it is resumed."""

    config: dict[str, Any]
    config_sha256: str
    lanes: Annotated[int, Field(ge=1)]
    samples: int | None
    threads: int | None
    device: str
    versions: dict[str, str]


def _check_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity with all of its fields, also those of a later version; raises ValueError if a type is wrong."""
    TypeAdapter(Identity).validate_python(identity, strict=True)
    return identity


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    __pydantic_config__ = ConfigDict(strict=True)  # of what is read

    step: Annotated[int, Field(ge=0, le=2**53)]
    files: list[Written]
    identity: Annotated[dict[str, Any], AfterValidator(_check_identity)]  # of the run: what must fit on resume
    metrics: dict[str, float | None] = field(default_factory=dict)  # None stands for a value that is not finite
    time: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        """The manifest with its own checksum."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _seal(content)}, indent=1)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder; raises Damaged."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        seal = content.pop("sha256")
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {type(error).__name__}") from None
    if seal != _seal(content):
        raise Damaged(f"{MANIFEST} has changed since it was written")
    if content.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has format {content.get('format')}, this version reads {FORMAT}")
    try:
        return _manifests().validate_json(json.dumps(content))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise Damaged(f"{MANIFEST} has a wrong value of {where}") from None


@cache
def _manifests() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def verify(path: Path) -> Manifest:
    """Read every file of a checkpoint and compare; raises Damaged with the first file that is not as written."""
    manifest = read_manifest(path)
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
            if size != file.size:
                raise Damaged(f"{file.name} has {size} bytes instead of {file.size}")
            if tensor_files.sha256_of_file(path / file.name) != file.sha256:
                raise Damaged(f"{file.name} has another checksum than when it was written")
        except OSError as error:
            raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
    return manifest


class Store:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is published."""
        return self.folder / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is being written, by all ranks."""
        return self.folder / f".step-{step:08d}.partial"

    def paths(self) -> list[Path]:
        """The published checkpoints, newest first."""
        found = [(int(match[1]), path) for path in self._entries() if (match := STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def damaged_paths(self) -> list[Path]:
        """The checkpoints that were set aside."""
        return sorted((path for path in self._entries() if path.name.startswith(DAMAGED)), reverse=True)

    def newest_step(self) -> int:
        """The step of the newest checkpoint, by its name; -1 if there is none."""
        return max((step_of(path) for path in self.paths()), default=-1)

    def newest_valid(self, on_damaged: Callable[[Path, str], None]) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that can be used; `on_damaged` gets newer ones, and why they cannot. Changes nothing.

        Raises CheckpointsDamaged if there are checkpoints and all of them are damaged: a run must not lose its past.
        """
        damaged = []
        for path in self.paths():
            try:
                return path, verify(path)
            except Damaged as reason:
                damaged.append(f"{path.name} ({reason})")
                on_damaged(path, str(reason))
        if damaged := [*damaged, *(path.name for path in self.damaged_paths())]:
            raise CheckpointsDamaged(
                f"none of the checkpoints in {self.folder} can be used: {', '.join(damaged)}; "
                "begin a new run with --resume never, or resume from another checkpoint with --resume PATH"
            )
        return None

    def publish(
        self, step: int, written: Sequence[Written], identity: dict[str, Any], metrics: Mapping[str, float]
    ) -> Path:
        """Give the partial checkpoint of a step its manifest and its name, in an order that no crash can tear.

        A whole one of the same step stays: to replace it would leave a moment with neither. It is told its metrics if
        it was saved before they were measured.
        """
        partial, path = self.partial(step), self.path(step)
        measured = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if path.exists():  # the run goes on from here and has not gone further
            try:
                found = verify(path)
            except Damaged:
                self.set_aside(path)
            else:
                self.discard(step)
                if measured and not found.metrics:
                    self._replace_manifest(path, replace(found, metrics=measured))
                return path
        for file in written:  # by other ranks, perhaps on other machines
            if (size := (partial / file.name).stat().st_size) != file.size:
                raise OSError(f"{partial / file.name} has {size} bytes instead of {file.size}")
        manifest = Manifest(
            step=step,
            files=sorted(written, key=lambda file: file.name),
            identity=identity,
            metrics=measured,
            time=round(time.time(), 3),
        )
        tensor_files.write(partial / MANIFEST, [manifest.to_json().encode()])
        tensor_files.sync_folder(partial)
        partial.rename(path)
        tensor_files.sync_folder(self.folder)
        return path

    def _replace_manifest(self, path: Path, manifest: Manifest) -> None:
        """At every moment there is a whole one, the old or the new."""
        new = path / f".{MANIFEST}"
        tensor_files.write(new, [manifest.to_json().encode()])
        new.rename(path / MANIFEST)
        tensor_files.sync_folder(path)

    def discard(self, step: int) -> None:
        """Remove what there is of a checkpoint that could not be written."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """The checkpoints that killed runs were writing or removing. Only while no process writes here."""
        return [path for path in self._entries() if path.name.endswith(".partial")]

    def clean(self) -> None:
        """Remove the leftovers."""
        for path in self.leftovers():
            shutil.rmtree(path, ignore_errors=True)

    def retain(self, keep: int, best: tuple[str, str] | None) -> None:
        """Remove checkpoints that are neither among the newest nor the best; after a newer one has been verified."""
        spared = {*self.paths()[:keep]}
        if best is not None:
            spared.add(self.best(*best) or Path())
        for path in self.paths():
            if path not in spared:
                # A folder with a dot is no checkpoint, so a kill in the middle leaves none that is half there.
                doomed = path.with_name(f".{path.name}.partial")
                with suppress(OSError):
                    path.rename(doomed)
                    shutil.rmtree(doomed)

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the best value of a metric."""
        values: dict[Path, float] = {}
        for path in self.paths():
            with suppress(Damaged):
                value = read_manifest(path).metrics.get(metric)
                if value is not None:
                    values[path] = value
        if not values:
            return None
        return (min if mode == "min" else max)(values, key=lambda path: values[path])

    def set_aside(self, path: Path) -> Path:
        """Give a damaged checkpoint a name under which it is kept and not used; its new path."""
        stem = f"{DAMAGED}{path.name}"
        aside = next(
            path.with_name(name)
            for name in (stem, *(f"{stem}-{n}" for n in range(2, 10_000)))
            if not path.with_name(name).exists()
        )
        return path.rename(aside)

    def _entries(self) -> Iterable[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []


def step_of(path: Path) -> int:
    """The step that a published checkpoint's name tells."""
    match = STEP.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
