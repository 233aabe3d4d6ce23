"""Copies one run folder to its place in a mirror: what is to be copied, in which order, and what is removed there.

A checkpoint is copied file by file, then the events up to it, then its manifest; so one with a manifest is complete.
The newest checkpoint has precedence over everything else, also while an older one is being copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.store import (
    MANIFEST,
    STEP_NAME,
    DamagedCheckpoint,
    Manifest,
    Store,
    parse_manifest,
    read_manifest,
    step_of,
)
from paceline.mirror.claim import Claim
from paceline.mirror.place import OnBytes
from paceline.run.layout import RunFolder

CONFIG, EVENTS, RESULT = "config.yaml", "events.jsonl", "result.json"
WEIGHTS = ("weights.safetensors", "ema.safetensors", RESULT)  # in this order: a result has its weights
GROWING = (EVENTS, "wandb.json", "mlflow.json")
SMALL_BYTES = 1_000_000  # larger logs are not copied
LOGS = (".log", ".txt")  # the other files there change every second
INTERVAL_S = 10.0  # between two copies of a file that changes
PATIENCE = 20  # times as long as its copy took: a file that changes takes at most a twentieth of the time
FOLDER = "checkpoints"


class Retention(NamedTuple):
    """The checkpoints that are kept: a number of the newest, and the best by a metric with its mode."""

    keep: int
    best: tuple[str, str] | None


class CopyTask(NamedTuple):
    """One file that is to be copied, with a description of what it belongs to."""

    what: str
    nbytes: int
    copy: Callable[[], None]


@dataclass
class Signature:
    """The state of a file when it was copied, and when it may be copied again."""

    size: int
    changed_ns: int
    next_at: float = 0.0


@dataclass
class Copier:
    """The copies of one run folder, which `copy_next` brings up to date."""

    folder: RunFolder
    claim: Claim
    retention: Retention
    on_bytes: OnBytes
    on_mirrored: Callable[[Manifest, float], None]
    _copied: dict[str, Signature] = field(default_factory=dict)
    _present: dict[int, Manifest] = field(default_factory=dict)  # complete in the mirror
    _sent: dict[str, str] = field(default_factory=dict)  # checksums of files of checkpoints that are not complete
    _began: dict[int, float] = field(default_factory=dict)
    _unusable: set[tuple[str, int]] = field(default_factory=set)  # local checkpoints that cannot be copied
    _unreadable: set[str] = field(default_factory=set)  # other files that cannot be copied

    def __post_init__(self) -> None:
        """Find what is in the mirror already."""
        place = self.claim.place
        for name, size in place.sizes().items():
            parts = name.split("/")
            match = STEP_NAME.fullmatch(parts[1]) if len(parts) == 3 and parts[0] == FOLDER else None
            if match and parts[2] == MANIFEST:
                with suppress(DamagedCheckpoint):
                    self._present[int(match[1])] = parse_manifest(place.read(name) or b"")
            elif parts[0] == "images":  # written once
                with suppress(OSError):
                    status = (self.folder.path / name).stat()
                    if status.st_size == size:
                        self._copied[name] = Signature(size, status.st_mtime_ns)

    def copy_next(self, *, is_last: bool) -> bool:
        """Copy the most important file, if any; False if everything is copied. `is_last` copies all that changed."""
        work = next(self.work(is_last=is_last), None)
        if work is not None:
            work.copy()
        return work is not None

    def forget_removed(self) -> bool:
        """Find what others have removed from the mirror, which is then copied again; whether there is anything."""
        sizes = self.claim.place.sizes()
        names = [name for name in self._copied if name not in sizes]
        steps = [step for step, manifest in self._present.items() if not _is_whole(manifest, sizes)]
        for name in names:
            del self._copied[name]
        for step in steps:
            del self._present[step]
        self.claim.renew()
        return bool(names or steps)

    def work(self, *, is_last: bool) -> Iterator[CopyTask]:
        """What is to be copied, the most important first."""
        missing = self._missing_checkpoints()
        yield from self._changed(CONFIG, is_last=is_last)
        if not self._present and EVENTS not in self._copied:  # they show later that there was no checkpoint yet
            yield from self._changed(EVENTS, is_last=is_last)
        for path in missing[:1]:
            yield from self._work_of(path)
        if self.folder.result.exists():
            for name in WEIGHTS:
                yield from self._changed(name, is_last=is_last)
        for path in missing[1:]:
            yield from self._work_of(path)
        for name in (*GROWING, *self._small_files()):
            yield from self._changed(name, is_last=is_last)

    # --- files outside checkpoints ---------------------------------------------------------------------------------

    def _small_files(self) -> Iterator[str]:
        path = self.folder.path
        yield from sorted(f"images/{image.name}" for image in path.glob("images/*.png"))
        for log in sorted(self.folder.logs.glob("*")):
            if log.suffix in LOGS and log.name != "mirror.log":
                with suppress(OSError):
                    if log.is_file() and log.stat().st_size <= SMALL_BYTES:
                        yield f"logs/{log.name}"

    def _changed(self, name: str, *, is_last: bool) -> Iterator[CopyTask]:
        """A file, if it has changed since it was copied."""
        try:
            status = (self.folder.path / name).stat()
        except OSError:
            return
        before = self._copied.get(name)
        if name in self._unreadable:
            return
        if before is None or (
            (before.size, before.changed_ns) != (status.st_size, status.st_mtime_ns)
            and (is_last or time.monotonic() >= before.next_at)
        ):
            yield CopyTask(name, status.st_size, partial(self._copy, name))

    def _copy(self, name: str) -> None:
        """Copy a file as it is now; one that disappears meanwhile is left out."""
        began = time.monotonic()
        if name in (EVENTS, RESULT):
            self.claim.check()
        try:
            source = (self.folder.path / name).open("rb")
            status = (self.folder.path / name).stat()
        except FileNotFoundError:
            return
        except OSError:
            self._unreadable.add(name)
            return
        with source:
            self.claim.place.put(name, source, status.st_size, self.on_bytes)
        now = time.monotonic()
        later = now + max(INTERVAL_S, PATIENCE * (now - began))
        self._copied[name] = Signature(status.st_size, status.st_mtime_ns, later)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _missing_checkpoints(self) -> list[Path]:
        """The local checkpoints that are not in the mirror as they are here, newest first."""
        missing = []
        for path in Store(self.folder.checkpoints).paths():
            present = self._present.get(step_of(path))
            if _identity_of(path) not in self._unusable and (present is None or present != _local_manifest(path)):
                missing.append(path)
        return missing

    def _work_of(self, path: Path) -> Iterator[CopyTask]:
        """The files of a checkpoint that are still to be copied, then its manifest."""
        manifest = _local_manifest(path)
        if manifest is None:
            self._leave_out(path)
            return
        step = manifest.step
        self._began.setdefault(step, time.monotonic())
        present = self._present.get(step)
        known = {file.name: file.sha256 for file in present.files} if present is not None else {}
        for file in manifest.files:
            name = f"{FOLDER}/{path.name}/{file.name}"
            if file.sha256 not in (known.get(file.name), self._sent.get(name)):
                yield CopyTask(path.name, file.size, partial(self._send, path, name, file.sha256))
        yield CopyTask(path.name, 0, partial(self._publish, path, manifest))

    def _send(self, path: Path, name: str, sha256: str) -> None:
        """Copy one file of a checkpoint; what the mirror has of this step is no checkpoint until it is complete."""
        try:
            source = (self.folder.path / name).open("rb")
        except OSError:
            self._leave_out(path)
            return
        if self._present.pop(step_of(path), None) is not None:
            self.claim.place.remove([f"{FOLDER}/{path.name}/{MANIFEST}"])
        with source:
            size = (self.folder.path / name).stat().st_size
            self._sent[name] = self.claim.place.put(name, source, size, self.on_bytes)
        if self._sent[name] != sha256:
            self._leave_out(path)

    def _leave_out(self, path: Path) -> None:
        """Do not copy a checkpoint that is damaged or cannot be read, until there is another one of its step."""
        if path.exists():
            self._unusable.add(_identity_of(path))

    def _publish(self, path: Path, manifest: Manifest) -> None:
        """Copy the events up to a checkpoint, and then its manifest."""
        self._copy(EVENTS)
        self.claim.place.write(f"{FOLDER}/{path.name}/{MANIFEST}", manifest.to_json().encode())
        self._present[manifest.step] = manifest
        prefix = f"{FOLDER}/{path.name}/"
        self._sent = {name: sha256 for name, sha256 in self._sent.items() if not name.startswith(prefix)}
        self.on_mirrored(manifest, time.monotonic() - self._began.pop(manifest.step))
        self.prune()

    def prune(self) -> None:
        """Remove the checkpoints that are no longer kept, and files of checkpoints that were never completed.

        A store may not permit this; then everything is kept.
        """
        local = {step_of(path) for path in Store(self.folder.checkpoints).paths()}
        removed = obsolete(self._present, local, self.retention)
        kept = (self._present.keys() | local) - removed
        with suppress(PermissionError, NotImplementedError):
            names = list(self.claim.place.sizes())
            for step in removed:
                self._present.pop(step, None)
            self.claim.place.remove(sorted((name for name in names if _is_obsolete(name, kept)), key=_manifest_first))


def obsolete(present: Mapping[int, Manifest], local: set[int], retention: Retention) -> set[int]:
    """The steps in a mirror to remove: all except the newest and the best, and those after the newest local one.

    A run that was resumed from an earlier step has no later ones any more. The best may be in the mirror only. Nothing
    is obsolete while the newest local checkpoint is not in the mirror.
    """
    newest = max(local, default=None)
    if newest is None or newest not in present:
        return set()
    steps = sorted((step for step in present if step <= newest), reverse=True)
    kept = {*steps[: retention.keep], *(local & present.keys())}
    if retention.best is not None:
        metric, mode = retention.best
        values = {step: value for step in steps if (value := present[step].metrics.get(metric)) is not None}
        if values:
            kept.add((min if mode == "min" else max)(values, key=lambda step: values[step]))
    return {*present} - kept


def _is_whole(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """Whether the files of a checkpoint are among those in a mirror."""
    folder = f"{FOLDER}/step-{manifest.step:08d}"
    return all(f"{folder}/{name}" in sizes for name in (MANIFEST, *(file.name for file in manifest.files)))


def _is_obsolete(name: str, kept: set[int]) -> bool:
    """Whether a file belongs to a checkpoint that is not kept."""
    parts = name.split("/")
    match = STEP_NAME.fullmatch(parts[1]) if len(parts) == 3 and parts[0] == FOLDER else None
    return match is not None and int(match[1]) not in kept


def _manifest_first(name: str) -> tuple[bool, str]:
    return not name.endswith(f"/{MANIFEST}"), name


def _identity_of(path: Path) -> tuple[str, int]:
    """The name of a checkpoint, and when its folder was changed: a resumed run may save the same step again."""
    try:
        return path.name, path.stat().st_mtime_ns
    except OSError:
        return path.name, 0


def _local_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except DamagedCheckpoint:
        return None


class Status(NamedTuple):
    """What is still to be copied: names of checkpoints and files, and their size."""

    left: list[str]
    left_bytes: int


def status_of(copier: Copier) -> Status:
    """What is still to be copied at this moment."""
    left = list(copier.work(is_last=True))
    return Status(list(dict.fromkeys(work.what for work in left)), sum(work.nbytes for work in left))
