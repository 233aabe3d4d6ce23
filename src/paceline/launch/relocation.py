"""Handles a run folder that is moved or deleted while its run continues.

All processes of a run access its folder by its path. If it is moved, a link in the old place points them to the new
one, so the run stays in one folder. If it is deleted, a new folder is created, in which the run can be saved.
If another file or folder replaces it, the run must end: its ranks would write there.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from shlex import quote
from types import TracebackType

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.observe.events import Events
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.run.lock import locked

INTERVAL_S = 0.2


class FolderWatcher:
    """A thread that keeps the path of a run folder valid, in the process that has locked the folder."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder, self._config = folder, config
        self._handle = _open(folder.path)
        self._links: set[str] = set()  # the targets of links that were created here
        self.conflict: str | None = None  # the reason why the run must end
        self._has_config = folder.config.exists()  # a resumed run may already be without it
        self._locks = ExitStack()  # of folders that were created here
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-folder", daemon=True)

    def __enter__(self) -> FolderWatcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._locks.close()
        os.close(self._handle)

    def check(self) -> None:
        """Make the path valid again if it is not, and write a warning; or set `conflict`."""
        folder = self._folder
        if self.conflict is not None:
            return
        with self._lock, suppress(OSError):  # a disk that cannot be used now is checked again later
            if not _leads_to(folder.path, self._handle):
                text = self._follow()
                if text is None:
                    return
            elif self._has_config and not folder.config.exists():
                self._complete()
                text = f"{folder.config} was deleted and has been written again"
            else:
                self._has_config = folder.config.exists()
                return
            with closing(Events(folder.events)) as events:
                events.write("warning", text=text)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.check()

    def _follow(self) -> str | None:
        """Link the path to the moved folder, or create a new one; a text for a warning, None if neither is possible."""
        path, moved_to = self._folder.path, _path_of(self._handle)
        if moved_to is not None and self._link(path, moved_to):
            return f"{path} was moved to {moved_to}; the run continues there, through a link in the old place"
        cause = "was deleted" if moved_to is None else f"was moved to {moved_to}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir() or any(path.iterdir()):
                rest = "" if moved_to is None else f"; resume with --resume {quote(str(moved_to))}"
                self.conflict = (
                    f"{path} {cause} while its run was training, and another file or folder is in its place{rest}"
                )
                return None
        old, self._handle = self._handle, _open(path)
        os.close(old)
        self._complete()
        return f"{path} {cause}; the run continues in a new folder, without the earlier checkpoints and events"

    def _link(self, path: Path, target: Path) -> bool:
        """Link a path to a folder; False if another file has the path, or the file system has no links."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() and str(path.readlink()) in self._links:  # the folder was moved again
                path.unlink()
            link = os.path.relpath(target, path.parent)
            path.symlink_to(link)
        except OSError:
            return False
        self._links.add(link)
        return True

    def _complete(self) -> None:
        """Create the files that the run needs in the folder: logs, lock and config."""
        self._folder.logs.mkdir(exist_ok=True)
        with suppress(ConfigError):  # it is already locked
            self._locks.enter_context(locked(self._folder))
        if not self._folder.config.exists():
            write_text(self._folder.config, self._config.to_yaml())


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _leads_to(path: Path, handle: int) -> bool:
    """Whether a path refers to an open folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _path_of(handle: int) -> Path | None:
    """The current path of an open folder; None if it was deleted, or if it is unknown."""
    with suppress(OSError):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if _leads_to(path, handle):
            return path
    return None
