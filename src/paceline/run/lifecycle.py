"""Creates run folders, opens them for a launch, and removes the records of an earlier attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.run.lock import locked


@contextmanager
def open_run(config: Config, run_dir: Path | None) -> Iterator[RunFolder]:
    """Lock the folder of the run to resume, or of a new run if `run_dir` is None, until the block ends."""
    folder = RunFolder(run_dir or new_folder(config.run_dir, Path("runs") / config.name))
    if run_dir is None:
        _check_is_free(folder, config)  # before the lock, which would leave a file there
    with locked(folder):
        if run_dir is None:
            _check_is_free(
                folder, config
            )  # again: of two simultaneous starts, the rejected one must not leave its config
        folder.logs.mkdir(exist_ok=True)
        if run_dir is None:
            write_text(folder.config, config.to_yaml())
        yield folder


def new_folder(wanted: Path | None, parent: Path) -> Path:
    """Create the folder `wanted`, or else a new `<parent>/<date-time>`; returns its absolute path."""
    if wanted is not None:
        _make(wanted, exist_ok=True)
        return wanted.resolve()
    parent = parent.resolve()
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(1, 10_000):
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        if not path.exists() and _make(path, exist_ok=False):
            return path
    raise AssertionError(f"no free run folder under {parent}")


def reopen(folder: RunFolder, config: Config) -> None:
    """Write the config of a resumed run and remove its old result; call it after the checkpoint has been checked."""
    write_text(folder.config, config.to_yaml())
    for path in (folder.result, folder.value, folder.fetched):  # written again at the end
        path.unlink(missing_ok=True)


def clear_last_attempt(folder: RunFolder) -> None:
    """Remove the ranks' records of their end before they start again; hang reports are kept.

    This includes the value: a pickled value that exists later was written by the new ranks, so it is safe to load.
    """
    keep_hang_report(folder)
    for path in (folder.value, folder.pickled_value, folder.stopped, *folder.logs.glob("rank-*.json")):
        path.unlink(missing_ok=True)


def keep_hang_report(folder: RunFolder) -> Path | None:
    """Rename the report of a hang to hang-1.txt and so on, so that the next one does not replace it."""
    numbered = folder.logs / f"hang-{1 + sum(1 for _ in folder.logs.glob('hang-*.txt'))}.txt"
    try:
        return folder.hang.rename(numbered)
    except OSError:
        return None


def _check_is_free(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if the folder already contains a run."""
    if folder.config.exists() or folder.has_checkpoints():
        is_final = not config.keeps_state and folder.has_result()
        action = "resume it" if config.keeps_state else "start it again"
        way_out = "" if is_final else f"{action} with --resume auto, "
        raise ConfigError(
            f"run_dir={config.run_dir} already contains a run; {way_out}choose another folder or remove it"
        )


def _make(path: Path, *, exist_ok: bool) -> bool:
    """Create a folder; False if another process has created it first."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok or not path.is_dir():
            raise ConfigError(f"run_dir={path} is a file; choose another name") from None
        return False
    except OSError as error:
        raise ConfigError(
            f"run_dir={path} cannot be created: {error.strerror}; choose another with --run-dir"
        ) from None
    return True
