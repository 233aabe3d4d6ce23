"""The process that tells one tracker of a run, so that whatever the tracker does costs the run nothing.

It reads `events.jsonl` until a byte comes by its standard input, or that ends with the launcher.
"""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import closing, suppress
from pathlib import Path

from paceline.observe.events import Events
from paceline.observe.sinks.mlflow import MlflowRun
from paceline.observe.sinks.sink import Channel
from paceline.observe.sinks.tracker import Tracker
from paceline.observe.sinks.wandb import WandbRun
from paceline.run.layout import RunFolder

KNOWN: dict[str, type[Tracker]] = {kind.name: kind for kind in (WandbRun, MlflowRun)}
INTERVAL_S = 1.0
RETRY_S = 30.0


def main() -> None:
    """`NAME RUN_FOLDER`; exit code 1 if the tracker has not taken everything."""
    name, path = sys.argv[-2:]
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    sys.exit(0 if follow(KNOWN[name], RunFolder(Path(path)), over) else 1)


def _wait_for_end(over: threading.Event) -> None:
    sys.stdin.buffer.read(1)
    over.set()


def follow(kind: type[Tracker], folder: RunFolder, over: threading.Event) -> bool:
    """Tell a tracker of the run until it is over; whether it knows everything then.

    An error costs one warning. Some time later, and at the end, it is tried again from where the tracker was.
    """
    has_warned = False
    while True:
        is_last = over.is_set()
        try:
            _tell(kind(folder), folder, over)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run is not concerned
            traceback.print_exc()
            if not has_warned:
                _warn(folder, kind.name, error)
                has_warned = True
        else:
            return True
        if is_last:
            return False
        over.wait(RETRY_S)


def _tell(tracker: Tracker, folder: RunFolder, over: threading.Event) -> None:
    channel = Channel(folder.events, tracker)
    while not over.wait(INTERVAL_S):
        channel.look()
    channel.look()
    tracker.close()


def _warn(folder: RunFolder, name: str, error: Exception) -> None:
    first = (str(error).splitlines() or [type(error).__name__])[0][:300]
    with suppress(OSError), closing(Events(folder.events)) as events:
        events.write("warning", text=f"{name} is not told of this run: {first}; the run goes on, and it is tried again")
