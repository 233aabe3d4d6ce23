"""`paceline board`: starts the installed TensorBoard on the loopback address, so only this machine can connect."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import ConfigError

HOST = "127.0.0.1"


def serve(runs: Sequence[Path], port: int | None, log: Callable[[str], None]) -> None:
    """Show runs until Ctrl-C; `log` is called with the address. The default port is the first free one from 6006."""
    arguments = ["--host", HOST, *_folders(runs), *([] if port is None else ["--port", str(port)])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard triggers warnings of its own libraries
        address = _launch(arguments)
    with suppress(KeyboardInterrupt):
        log(f"TensorBoard shows {', '.join(map(str, runs))} at {address} (press Ctrl-C to stop)")
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
        raise ConfigError(f"TensorBoard cannot start: {error.msg}; choose another --port, or omit it") from None


def _folders(runs: Sequence[Path]) -> list[str]:
    """TensorBoard's option for one folder, or for several with names."""
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"{run} is not a folder; give run folders, such as runs/NAME/DATE-TIME")
    if len(runs) == 1:
        return ["--logdir", str(runs[0])]
    for run in runs:
        if set(str(run)) & set(",:"):
            raise ConfigError(f"{run} contains a comma or a colon; show this run alone, or its parent folder")
    # A name must not start with a slash, or TensorBoard interprets it as the path.
    return ["--logdir_spec", ",".join(f"{str(run).strip('/')}:{run}" for run in runs)]
