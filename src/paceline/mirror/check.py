"""Checks a mirror before a run starts: its package, and whether it can be written."""

from __future__ import annotations

import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.mirror.claim import is_inside, mirror_root
from paceline.mirror.place import file_system_of, reason_of
from paceline.system.paths import is_url

CHECK_S = 10.0  # for an answer of the store; without one, the run starts, and the copying is tried later
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")


def check_mirror(config: Config) -> None:
    """Raise a ConfigError if the run cannot be mirrored; print a warning if the store cannot be reached now."""
    mirror = config.checkpoint.mirror
    if mirror is None:
        return
    root = mirror_root(mirror)
    folder = (config.run_dir or Path("runs") / config.name / "DATE-TIME").resolve()
    if is_inside(f"{root}/{config.name}/{folder.name}", folder):
        raise ConfigError(f"checkpoint.mirror={mirror} is the run folder or inside it; give a folder on another disk")
    fs, path = file_system_of(root, is_new=True)
    problems: list[Exception] = []

    def probe() -> None:
        try:
            _write_and_remove(fs, path, is_folder=not is_url(root))
        except Exception as error:  # noqa: BLE001 - libraries of stores raise anything
            problems.append(error)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(CHECK_S)
    if thread.is_alive():
        problems.append(TimeoutError(f"no answer within {CHECK_S:g} s"))
    for error in problems[:1]:
        if problem := _problem(error, is_folder=not is_url(root)):
            raise ConfigError(f"checkpoint.mirror={mirror} {problem}")
        print(
            f"warning: checkpoint.mirror={mirror} cannot be reached now: {reason_of(error)}; the run starts, and the "
            "copying is tried again", file=sys.stderr, flush=True,
        )  # fmt: skip


def _write_and_remove(fs: object, path: str, *, is_folder: bool) -> None:
    name = f"{path.rstrip('/')}/.paceline-{secrets.token_hex(4)}"
    if is_folder:
        Path(path).mkdir(parents=True, exist_ok=True)
    fs.pipe_file(name, b"")  # type: ignore[attr-defined]
    with suppress(PermissionError):  # a store may not permit to remove anything
        fs.rm_file(name)  # type: ignore[attr-defined]


def _problem(error: Exception, *, is_folder: bool) -> str | None:
    """What is wrong, if a later attempt would find the same; None if the store may be reached later."""
    if isinstance(error, TimeoutError):
        return None
    if type(error).__name__ in NO_CREDENTIALS:
        return (
            f"needs credentials ({reason_of(error)}); set the environment variables or files of its library, such as "
            "AWS_ACCESS_KEY_ID or ~/.aws/credentials"
        )
    if isinstance(error, PermissionError):
        return f"cannot be written to: {_strerror(error)}; check its permissions and your credentials"
    if is_folder and isinstance(error, OSError):
        return f"cannot be written to: {_strerror(error)}; give a folder on another disk, or a URL such as s3://bucket"
    if isinstance(error, FileNotFoundError):
        return f"does not exist ({reason_of(error)}); create the bucket, or correct its name"
    return None


def _strerror(error: OSError) -> str:
    return error.strerror if isinstance(error.strerror, str) else reason_of(error)
