"""The place of a run in its mirror: `MIRROR/NAME/RUN FOLDER`, which belongs to one run and has one writer at a time.

The file `mirrored.json` in the place has the id of the run and of the process that writes there. A run that is resumed
elsewhere takes its place over, and the process that wrote there before stops. The run folder has the id and the place
in `mirror.json`.
"""

from __future__ import annotations

import itertools
import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.mirror.place import RECORD, MirrorPlace
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.paths import is_url


class TakenOver(Exception):
    """Another process writes this run's mirror now."""


class InsideRunFolder(Exception):
    """The place is in the run folder itself."""


class Claim:
    """The right to write a place, until another process of the same run takes it over."""

    def __init__(self, place: MirrorPlace, run: str, writer: str) -> None:
        self.place, self._run, self._writer = place, run, writer

    def reopen(self) -> None:
        """Open the place again after an error, with a new connection and new credentials."""
        self.place = MirrorPlace(self.place.url, is_new=True)
        self.check()

    def note(self, folder: RunFolder) -> None:
        """Write the place to the run folder, also after the folder was deleted and created again during the run."""
        if folder.config.exists() and not folder.mirror.exists():
            with suppress(OSError):
                write_json(folder.mirror, {"place": self.place.url, "run": self._run})

    def renew(self) -> None:
        """Write the record again if it was removed."""
        if _record_in(self.place) is None:
            self.place.write(RECORD, _record(self._run, self._writer))

    def check(self) -> None:
        """Raise TakenOver if another process writes here now."""
        found = _record_in(self.place)
        if found is not None and (found.get("run"), found.get("writer")) != (self._run, self._writer):
            raise TakenOver(f"{self.place.url} is now written by a process on {found.get('host')}")


def claim(folder: RunFolder, mirror: str, name: str) -> Claim:
    """Claim the place of this run below `mirror`: the one it had before, else a new one of the folder's name."""
    known = read_mirror(folder)
    run = str(known.get("run") or secrets.token_hex(8))
    writer = secrets.token_hex(8)
    record = _record(run, writer)
    for url in _candidates(mirror_root(mirror), str(known.get("place") or ""), name, folder.path.name):
        if is_inside(url, folder.path):
            raise InsideRunFolder(url)
        place = MirrorPlace(url, is_new=True)
        found = _record_in(place)
        if found is None and not (place.sizes() and url != known.get("place")) and place.create(RECORD, record):
            break
        if found is not None and found.get("run") == run:
            place.write(RECORD, record)
            break
    with suppress(OSError):  # of a folder that was deleted in this moment; `note` writes it later
        write_json(folder.mirror, {"place": url, "run": run})
    return Claim(place, run, writer)


def read_mirror(folder: RunFolder) -> dict[str, Any]:
    """The content of `mirror.json`; empty if the run has not been mirrored."""
    with suppress(OSError, ValueError):
        known = json.loads(folder.mirror.read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
    return {}


def is_inside(url: str, folder: Path) -> bool:
    """Whether a place is a run folder, or in it."""
    return not is_url(url) and Path(url).resolve().is_relative_to(folder.resolve())


def mirror_root(mirror: str) -> str:
    """The value of `checkpoint.mirror` without a slash at its end; a folder as an absolute path."""
    return mirror.rstrip("/") if is_url(mirror) else str(Path(mirror).expanduser().absolute())


def _candidates(root: str, known: str, name: str, folder: str) -> Iterator[str]:
    if known.startswith(f"{root}/"):
        yield known
    yield f"{root}/{name}/{folder}"
    yield from (f"{root}/{name}/{folder}-{number}" for number in itertools.count(2))


def _record(run: str, writer: str) -> bytes:
    return json.dumps({"run": run, "writer": writer, "host": socket.gethostname()}).encode()


def _record_in(place: MirrorPlace) -> dict[str, Any] | None:
    content = place.read(RECORD)
    if content is None:
        return None
    with suppress(ValueError):
        record = json.loads(content)
        if isinstance(record, dict):
            return record
    return {}
