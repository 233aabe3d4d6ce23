"""Downloads a mirrored run into a new run folder, in which it is resumed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from paceline.checkpoint.store import MANIFEST, DamagedCheckpoint, Store, verify
from paceline.config import Config
from paceline.errors import CheckpointsDamaged, ConfigError
from paceline.mirror.copier import CONFIG, EVENTS, FOLDER, GROWING
from paceline.mirror.place import RECORD, MirrorPlace, OnBytes
from paceline.mirror.transfer import (
    LISTED,
    Unreadable,
    check_sizes,
    get_file,
    json_of,
    manifest_in,
    opened,
    patiently,
    progress,
    sizes_of_run,
    steps_in,
)
from paceline.run.atomic_files import write_json, write_text
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import new_folder

IMAGE = re.compile(r"images/[\w-][\w.-]*\.png")
SAVED = (b'"event": "checkpoint"', b'"event": "mirrored"', b'"event": "resumed"')  # in lines of events.jsonl


def fetch_to_resume(config: Config) -> Path:
    """Download what a run needs to be resumed: the newest valid checkpoint, the best one, the events."""
    place = opened(config.resume)
    sizes = sizes_of_run(place)
    folder = RunFolder(new_folder(config.run_dir, Path("runs") / config.name))
    if folder.fetched.exists() and not folder.config.exists():  # a download that was killed
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
    if folder.holds_run() or folder.has_checkpoints():
        raise ConfigError(
            f"run_dir={config.run_dir} already contains a run; resume it with --resume auto, or choose another folder"
        )
    if not steps_in(sizes):
        _check_is_new(place)
    is_ours = not any(folder.path.iterdir())
    try:
        _fetch_into(folder, place, sizes, config)
    except BaseException:
        if is_ours:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder.path


def _fetch_into(folder: RunFolder, place: MirrorPlace, sizes: dict[str, int], config: Config) -> None:
    write_text(folder.fetched, f"{place.url}\n")
    folder.checkpoints.mkdir()
    names = [name for name in (*GROWING, *sizes) if name in GROWING or IMAGE.fullmatch(name)]
    best = config.checkpoint.best
    with progress(f"downloading {place.url}") as on_bytes:
        newest = _fetch_newest(folder, place, sizes, on_bytes)
        if best is not None and newest is not None:
            _fetch_best(folder, place, sizes, (best.metric, best.mode), on_bytes)
        for name in dict.fromkeys(name for name in names if name in sizes):
            get_file(place, name, folder.path / name, on_bytes)
        record = json_of(place, RECORD)
        write_json(folder.mirror, {"place": place.url, "run": record.get("run")})
        get_file(place, CONFIG, folder.config, on_bytes)  # last: without it, the folder is no run
    text = f"downloaded {newest.name} of {place.url} into {folder.path}" if newest is not None else (
        f"warning: {place.url} has no checkpoint, and its events show that the run had saved none yet; it starts from "
        f"the beginning, in {folder.path}"
    )  # fmt: skip
    print(text, file=sys.stderr, flush=True)


def _check_is_new(place: MirrorPlace) -> None:
    """Raise a ConfigError unless the events of a mirror without a checkpoint show that the run has never had one."""
    lines = (patiently(place, lambda: place.read(EVENTS)) or b"").splitlines()
    if lines and not any(event in line for line in lines for event in SAVED):
        return
    parent, _, name = place.url.rpartition("/")
    beside = MirrorPlace(parent)
    manifests = patiently(beside, lambda: beside.glob(f"*/{FOLDER}/step-*/{MANIFEST}"))
    others = sorted({manifest.split("/")[0] for manifest in manifests} - {name})
    listed = ", ".join(f"{parent}/{other}" for other in others[-LISTED:])
    hint = f"give another run of this name, which has one: {listed}; or " if others else ""
    raise ConfigError(f"{place.url} has no checkpoint yet; {hint}start a new run without --resume")


def _fetch_newest(folder: RunFolder, place: MirrorPlace, sizes: dict[str, int], on_bytes: OnBytes) -> Path | None:
    """The newest mirrored checkpoint that is valid, with a warning for each newer one; None if there is none at all."""
    reasons = []
    for step in steps_in(sizes):
        try:
            return _fetch_checkpoint(folder, place, sizes, step, on_bytes)
        except DamagedCheckpoint as reason:
            name = Store(folder.checkpoints).path(step).name
            reasons.append(f"{name} ({reason})")
            print(
                f"warning: {name} in {place.url} cannot be used: {reason}; the one before is tried", file=sys.stderr,
                flush=True,
            )  # fmt: skip
    if reasons:
        raise CheckpointsDamaged(f"none of the checkpoints in {place.url} can be used: {', '.join(reasons)}")
    return None


def _fetch_best(
    folder: RunFolder, place: MirrorPlace, sizes: dict[str, int], best: tuple[str, str], on_bytes: OnBytes
) -> None:
    """Download the best checkpoint by a metric, if it is in the mirror; a warning if it cannot be used."""
    metric, mode = best
    values: dict[int, float] = {}
    newest = Store(folder.checkpoints).newest_step()
    for step in (step for step in steps_in(sizes) if step <= newest):
        try:
            value = manifest_in(place, step).metrics.get(metric)
        except (DamagedCheckpoint, Unreadable):
            continue
        if value is not None:
            values[step] = value
    if not values:
        return
    step = (min if mode == "min" else max)(values, key=lambda step: values[step])
    if step != newest:
        try:
            _fetch_checkpoint(folder, place, sizes, step, on_bytes)
        except DamagedCheckpoint as reason:
            print(
                f"warning: the best checkpoint, of step {step}, cannot be used: {reason}", file=sys.stderr, flush=True
            )


def _fetch_checkpoint(
    folder: RunFolder, place: MirrorPlace, sizes: dict[str, int], step: int, on_bytes: OnBytes
) -> Path:
    """Download and verify one checkpoint; raises DamagedCheckpoint, also if it cannot be read."""
    store = Store(folder.checkpoints)
    partial, path = store.partial(step), store.path(step)
    if path.exists():
        return path
    try:
        manifest = manifest_in(place, step)
        check_sizes(manifest, sizes)
        for file in manifest.files:
            get_file(place, f"{FOLDER}/{path.name}/{file.name}", partial / file.name, on_bytes, file.sha256)
        (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        verify(partial)
        partial.rename(path)
    except Unreadable as reason:
        raise DamagedCheckpoint(str(reason)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path
