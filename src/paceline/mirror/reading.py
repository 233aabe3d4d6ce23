"""Copies of mirrored runs on this machine, to report and evaluate them: the small files first, weights when needed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from paceline.checkpoint.store import MANIFEST, Store, step_of
from paceline.errors import ConfigError
from paceline.formatting import redacted
from paceline.mirror.copier import CONFIG, EVENTS, FOLDER, RESULT
from paceline.mirror.place import MirrorPlace, is_mirrored
from paceline.mirror.transfer import get_file, manifest_in, opened, progress, sizes_of_run, steps_in
from paceline.run.atomic_files import write_text
from paceline.run.checked_files import sha256_of_file
from paceline.run.layout import RunFolder
from paceline.system.home import in_home
from paceline.system.paths import as_url, problem_with_place


def folder_of_run(run: Path | str) -> Path:
    """The folder of a run; for a mirror, also one in a folder, that of a copy: nothing else is written there."""
    if problem := problem_with_place(run):
        raise ConfigError(f"{redacted(str(run))} {problem}")
    place = as_url(run)
    return local_copy(place) if is_mirrored(place) else Path(place)


def local_copy(place: str) -> Path:
    """A folder with the config, events and result of a mirrored run, and the manifests of its checkpoints.

    It is in $PACELINE_HOME/mirrors and is brought up to date by each call. `fetch_weights` adds what `load` needs.
    """
    source = opened(place)
    sizes = sizes_of_run(source)
    name = "-".join((*source.url.rstrip("/").split("/")[-2:], hashlib.sha256(source.url.encode()).hexdigest()[:8]))
    folder = RunFolder(in_home("mirrors", name).resolve())
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    write_text(folder.fetched, f"{source.url}\n")
    before = folder.result.read_bytes() if folder.result.exists() else None
    with progress(f"reading {source.url}") as on_bytes:
        for name in (CONFIG, EVENTS, RESULT):
            if name in sizes:
                get_file(source, name, folder.path / name, on_bytes)
            else:
                (folder.path / name).unlink(missing_ok=True)
        if before is None or not folder.result.exists() or folder.result.read_bytes() != before:
            folder.weights.unlink(missing_ok=True)
            folder.ema.unlink(missing_ok=True)
        _copy_manifests(folder, source, sizes)
    return folder.path


def _copy_manifests(folder: RunFolder, source: MirrorPlace, sizes: dict[str, int]) -> None:
    store, steps = Store(folder.checkpoints), steps_in(sizes)
    for path in store.paths():
        if step_of(path) not in steps:
            shutil.rmtree(path)
    for step in steps:
        path = store.path(step)
        path.mkdir(exist_ok=True)
        (path / MANIFEST).write_bytes(source.read(f"{FOLDER}/{path.name}/{MANIFEST}") or b"")


def fetch_weights(folder: RunFolder, path: Path) -> None:
    """Download a checkpoint or a file of weights in a folder of `local_copy`; nothing in any other folder."""
    if not folder.fetched.exists():
        return
    source = MirrorPlace(folder.fetched.read_text(encoding="utf-8").strip())
    with progress(f"downloading {path.name} of {source.url}") as on_bytes:
        if not path.name.endswith(".safetensors"):
            manifest = manifest_in(source, step_of(path))
            for file in manifest.files:
                local = path / file.name
                if not (local.exists() and sha256_of_file(local) == file.sha256):
                    get_file(source, f"{FOLDER}/{path.name}/{file.name}", local, on_bytes, file.sha256)
        elif not path.exists():
            get_file(source, path.name, path, on_bytes)


def sizes_in(folder: RunFolder) -> dict[str, int]:
    """The sizes of the files of the mirror that a folder of `local_copy` belongs to."""
    return MirrorPlace(folder.fetched.read_text(encoding="utf-8").strip()).sizes()
