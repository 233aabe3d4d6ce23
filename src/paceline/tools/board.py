"""`paceline board`: starts the installed TensorBoard on the loopback address, which only this machine reaches."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import ConfigError

HOST = "127.0.0.1"


def serve(runs: Sequence[Path], port: int | None, log: Callable[[str], None]) -> None:
    """Show runs until Ctrl-C; `log` takes the address. Without a port, it is the first free one from 6006 on."""
    arguments = ["--host", HOST, *_folders(runs), *([] if port is None else ["--port", str(port)])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard triggers warnings of its own libraries
        address = _launch(arguments)
    with suppress(KeyboardInterrupt):
        log(f"TensorBoard shows {', '.join(map(str, runs))} at {address} (Ctrl-C ends it)")
        while True:
            signal.pause()


def _launch(arguments: Sequence[str]) -> str:
    """Start the server in a thread; returns its address."""
    try:
        from tensorboard.program import TensorBoard, TensorBoardServerException
    except ImportError as error:
        raise ConfigError(f"paceline board needs TensorBoard ({error}); pip install tensorboard") from None
    board = TensorBoard()
    board.configure(["tensorboard", *arguments])
    try:
        return str(board.launch())
    except TensorBoardServerException as error:
        raise ConfigError(f"TensorBoard cannot start: {error.msg}; choose another --port, or leave it out") from None


def _folders(runs: Sequence[Path]) -> list[str]:
    """TensorBoard's option for one folder, or for several with names."""
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"{run} is not a folder; give run folders such as runs/NAME/DATE-TIME")
    if len(runs) == 1:
        return ["--logdir", str(runs[0])]
    for run in runs:
        if set(str(run)) & set(",:"):
            raise ConfigError(f"{run} has a comma or a colon in its name; show it by itself, or the folder above it")
    # A name must not start with a slash, or TensorBoard takes it for the path.
    return ["--logdir_spec", ",".join(f"{str(run).strip('/')}:{run}" for run in runs)]
