"""The key that the hosts of a run share: a file in the run folder that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError

KEY_BYTES = 32


def key_of(config: Config) -> bytes:
    """The key in the run folder; the first host that needs it creates it."""
    folder = config.run_dir or Path("runs") / config.name
    path = folder / ".key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            _create(path)
        return _read(path)
    except FileNotFoundError:  # NFS does not show it yet; an agent retries
        raise
    except OSError as error:
        raise ConfigError(
            f"run_dir={folder} cannot store the key that the hosts share: {error.strerror}; choose another --run-dir"
        ) from None


def _create(path: Path) -> None:
    """Create the file together with its content; a file that another host has created in the meantime is kept."""
    number, name = tempfile.mkstemp(prefix=".key.", dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(number)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()


def _read(path: Path) -> bytes:
    """The content of the file; ConfigError if another user may have written or read it."""
    if path.is_symlink():
        raise _refusal(path, "is a link")
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode):
            raise _refusal(path, "is not a regular file")
        if facts.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {facts.st_uid}, and this is user {os.geteuid()}")
        if facts.st_mode & 0o077:
            raise _refusal(path, f"is accessible to other users (mode {stat.S_IMODE(facts.st_mode):04o})")
        content = os.read(number, KEY_BYTES + 1)
        if len(content) != KEY_BYTES:
            raise _refusal(path, f"has {facts.st_size} bytes instead of {KEY_BYTES}")
        return content
    finally:
        os.close(number)


def _refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}, so it cannot be the key of this run; remove it, or choose another --run-dir")
