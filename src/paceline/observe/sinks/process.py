"""The process that runs one sink of a run, so that a slow or failing sink does not affect the run.

It reads `events.jsonl` until it receives a byte on its standard input, or until that is closed because the launcher
has ended.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from paceline.observe.events import Events
from paceline.observe.sinks.registry import open_sink
from paceline.observe.sinks.sink import Sink, SinkFeeder
from paceline.run.layout import RunFolder

INTERVAL_S = 1.0
RETRY_S = 30.0


def main() -> None:
    """Run the sink `NAME` for `RUN_FOLDER`; exit code 1 if the sink has not received all events."""
    name, path = sys.argv[-2:]
    is_over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(is_over,), daemon=True).start()
    folder = RunFolder(Path(path))
    sys.exit(0 if run(name, partial(open_sink, name, folder.path), folder, is_over) else 1)


def _wait_for_end(is_over: threading.Event) -> None:
    sys.stdin.buffer.read(1)
    is_over.set()


def run(name: str, open_: Callable[[], Sink], folder: RunFolder, is_over: threading.Event) -> bool:
    """Deliver events to a sink until the run is over; return whether the sink has received all of them.

    The first error adds one warning to the events. A new sink is opened some time after an error, and at the end.
    """
    has_warned = False
    while True:
        is_last = is_over.is_set()
        try:
            _deliver(SinkFeeder(folder.events, open_()), is_over)
        except Exception as error:  # noqa: BLE001 - a sink may raise anything, and no error may end the run
            traceback.print_exc()
            if not has_warned:
                _warn(folder, name, error)
                has_warned = True
        else:
            return True
        if is_last:
            return False
        is_over.wait(RETRY_S)


def _deliver(feeder: SinkFeeder, is_over: threading.Event) -> None:
    while not is_over.wait(INTERVAL_S):
        feeder.deliver()
    feeder.deliver()
    feeder.sink.close()


def _warn(folder: RunFolder, name: str, error: Exception) -> None:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    text = f"{name} does not receive the events of this run: {reason}; training continues, and {name} is retried"
    with suppress(OSError), closing(Events(folder.events)) as events:
        events.write("warning", text=text)
