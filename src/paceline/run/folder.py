"""The run folder: this file owns the name of everything in it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from paceline.config import Config, read_yaml
from paceline.errors import ConfigError
from paceline.formatting import outcome_text
from paceline.run.result_file import read_result

RETRY_S = 0.001  # between attempts to lock a file while other processes ask whether it is locked
PATIENCE_S = 5.0  # with them


class RunFolder:
    """The folder that holds everything about one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.job = path / "job.bin"
        self.events = path / "events.jsonl"
        self.logs = path / "logs"
        self.hang = self.logs / "hang.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.stopped = self.logs / "stopped.json"
        self.request = self.logs / "request"  # a signal for ranks that others than the launcher have started
        self.ray = path / ".ray"  # what Ray Train writes for itself
        self.lock = path / ".lock"
        self.weights = path / "weights.safetensors"
        self.rank_0_weights = path / "weights-rank-0.safetensors"  # of ranks that disagree at the end of train_fn
        self.ema = path / "ema.safetensors"
        self.value = path / "value.json"  # what rank 0 returned to the caller of this start
        self.pickled_value = path / "value.pkl"  # the same, if JSON would not give it back as it was
        self.result = path / "result.json"
        self.metrics = path / "metrics.json"  # of an evaluation
        self.profile = path / "profile"
        self.slurm = path / "slurm.json"
        self.job_script = path / "slurm.sh"
        self.job_log = self.logs / "slurm.log"

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new run folder with the config in it: exactly `run_dir`, or `runs/<name>/<date-time>` of its own."""
        folder = cls(new_folder(config.run_dir, Path("runs") / config.name))
        folder.begin(config)
        return folder

    def begin(self, config: Config) -> None:
        """Give a folder that holds no run yet the config of one."""
        self.check_is_free(config)
        self.logs.mkdir(exist_ok=True)
        write_text(self.config, config.to_yaml())

    def check_is_free(self, config: Config) -> None:
        """A ConfigError if the folder holds a run already."""
        if self.config.exists() or self.has_checkpoints():
            is_final = config.train_fn is not None and self.has_result()
            again = "start it again" if config.train_fn is not None else "continue it"
            way_out = "" if is_final else f"{again} by --resume auto, "
            raise ConfigError(
                f"run_dir={config.run_dir} already holds a run; {way_out}choose another folder or remove it"
            )

    def reopen(self, config: Config) -> None:
        """Take up a run that goes on, with the config as it is now; only once it is sure that the two fit."""
        write_text(self.config, config.to_yaml())
        for path in (self.result, self.value):  # they come again at the end
            path.unlink(missing_ok=True)

    def holds_run(self) -> bool:
        """Whether this is the folder of a run, even if only one that was submitted."""
        return self.config.exists() or self.slurm.exists()

    def has_checkpoints(self) -> bool:
        """Whether checkpoints have been saved here, valid or not."""
        return any(self.checkpoints.glob("step-*"))

    def has_result(self) -> bool:
        """Whether the run has finished and left a result that can be read."""
        try:
            return isinstance(json.loads(self.result.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            return False

    def forget_last_life(self) -> None:
        """Remove what the ranks wrote about how they ended, before they start again; hangs are kept.

        A value is removed too: one that is found later was written by these ranks, so it is safe to unpickle.
        """
        self.set_hang_aside()
        for path in (self.value, self.pickled_value, self.stopped, *self.logs.glob("rank-*.json")):
            path.unlink(missing_ok=True)

    def set_hang_aside(self) -> Path | None:
        """Number the table of a hang, such as hang-1.txt, so that the next one does not replace it."""
        aside = self.logs / f"hang-{1 + sum(1 for _ in self.logs.glob('hang-*.txt'))}.txt"
        try:
            return self.hang.rename(aside)
        except OSError:
            return None

    def has_ending(self) -> bool:
        """Whether rank 0 has left a result, a value, or why it stopped."""
        return any(path.exists() for path in (self.result, self.value, self.pickled_value, self.stopped))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from going on with this run meanwhile; the system lets go of it when this process dies."""
        with self._open_lock() as file:
            if not _take_lock(file):
                raise ConfigError(
                    f"{self.path} is being trained by another process; wait for it, or choose another run"
                )
            yield

    def is_locked(self) -> bool:
        """Whether a process is training this run now. Asking takes a shared lock, which no start fails on."""
        try:
            with self.lock.open() as file:
                return not _lock(file, fcntl.LOCK_SH)
        except OSError:  # there is none, or another user's cannot be read
            return False

    def _open_lock(self) -> IO[str]:
        try:
            return self.lock.open("a+")  # NFS wants reading for a shared lock and writing for an exclusive one
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written to: {error.strerror}; go on with a copy of it, or begin a new run from "
                "one of its checkpoints: --resume RUN/checkpoints/step-…"
            ) from None

    def outcome(self) -> str | None:
        """How the run has ended, in words; None if it has not yet, or not well."""
        facts = read_result(self.result)
        return outcome_text(facts.step, facts.metrics, facts.weights_sha256) if facts is not None else None

    def how_to_go_on(self) -> str:
        """What can be done with a run that has not ended and that nobody trains."""
        if self.config.exists() and "train_fn" in read_yaml(self.config):
            return "its loop is your own (train_fn); --resume auto starts it from the beginning"
        return "--resume auto goes on with it"

    def log(self, rank: int | str) -> Path:
        """The log of one rank: everything it wrote to stdout and stderr."""
        return self.logs / f"rank-{rank}.log"

    def trace(self, rank: int) -> Path:
        """What one rank did in a few steps, for Perfetto."""
        return self.profile / f"rank-{rank}.json.gz"

    def tracker(self, name: str) -> Path:
        """What a tracker knows of this run, to go on with it in a later life."""
        return self.path / f"{name}.json"

    def tracker_log(self, name: str) -> Path:
        """What a tracker has printed."""
        return self.logs / f"{name}.log"

    def failure(self, rank: int) -> Path:
        """What a rank wrote about its own failure before it ended."""
        return self.logs / f"rank-{rank}.failure.json"

    def place(self, rank: int | str) -> Path:
        """Where a rank was a moment ago, for the others to read."""
        return self.logs / f"rank-{rank}.place.json"


@contextmanager
def opened(config: Config, run_dir: Path | None) -> Iterator[RunFolder]:
    """A new run folder, or that of a run that goes on, for this process alone until it is done."""
    folder = RunFolder(run_dir or new_folder(config.run_dir, Path("runs") / config.name))
    if run_dir is None:
        folder.check_is_free(config)  # also before the lock, which leaves a file there
    with folder.locked():
        if run_dir is None:
            folder.begin(config)  # inside, or of two runs that start at once, the refused one could leave its config
        folder.logs.mkdir(exist_ok=True)
        yield folder


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, and that is seen whole or not at all."""
    _write(path, content, 0o600)


def write_json(path: Path, content: dict[str, Any], *, is_lasting: bool = True) -> None:
    """Write a JSON file that is seen whole or not at all."""
    _write(path, (json.dumps(content, indent=2) + "\n").encode(), is_lasting=is_lasting)


def write_text(path: Path, content: str) -> None:
    """Write a text file that is seen whole or not at all."""
    _write(path, content.encode())


def _write(path: Path, content: bytes, mode: int = 0o666, *, is_lasting: bool = True) -> None:
    """Write a file and give it its name; a lasting one survives a machine that loses power at any moment.

    Its folder must exist: one that was moved away is looked for, not created again.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        if is_lasting:  # or the name could reach the disk before the content, and stand for an empty file
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if is_lasting:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_below(top: Path) -> Path | None:
    """The folder of the run that last began something, of all in `top/<name>/<date-time>`."""
    found = [path for path in top.glob("*/*") if RunFolder(path).holds_run()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def new_folder(wanted: Path | None, parent: Path) -> Path:
    """The folder that was asked for, or `<parent>/<date-time>` that nobody else has."""
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


def _take_lock(file: IO[str]) -> bool:
    """Lock an open file exclusively until it is closed; False if another process has done so.

    Processes that ask hold a shared lock for a moment. While this one can get a shared lock, too, nothing else is in
    the way, and it tries again.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not _lock(file, fcntl.LOCK_EX):
        if not _lock(file, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(RETRY_S)
    return True


def _lock(file: IO[str], kind: int) -> bool:
    """Lock an open file; False if the lock of another process forbids it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _make(path: Path, *, exist_ok: bool) -> bool:
    """Make a folder; False if somebody else has made it first."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok or not path.is_dir():
            raise ConfigError(f"run_dir={path} is a file; choose another name") from None
        return False
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made: {error.strerror}; choose another with --run-dir") from None
    return True
