"""The screen: a live view on a terminal, plain lines elsewhere, from the events of a run."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from paceline.formatting import printable, ranks_text
from paceline.observe.event_types import complete
from paceline.observe.live import (
    Facts,
    after,
    epoch_text,
    has_pace,
    left_s,
    left_text,
    measured_texts,
    speed_text,
    training_texts,
    view,
)

PLAIN_INTERVAL_S = 3.0
DRAWN_PER_S = 4


class Screen:
    """Shows a run to a person. Progress goes to stderr, what rank 0 prints goes to stdout."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, force_jupyter=False, highlight=False, soft_wrap=True)
        # A notebook's streams call themselves terminals, but they cannot move a cursor.
        is_own_stream = sys.stderr is sys.__stderr__
        self.is_live = is_own_stream and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live: Live | None = None
        self._facts = Facts()  # replaced as a whole: the thread that draws reads it
        self._heard = self._last_plain = time.monotonic()

    def show(self, event: dict[str, Any]) -> None:
        """React to one event; kinds it does not know are not for the screen."""
        event = complete(_printable(event))
        told = self._facts.told
        self._facts = after(self._facts, event)
        if self._facts.told != told:
            self._heard = time.monotonic()
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def line(self, text: str) -> None:
        """One line that rank 0 printed; on a terminal, above the view."""
        print(text, flush=True)

    def note(self, text: str, style: str = "") -> None:
        """One line from Paceline itself."""
        self.console.print(printable(text), style=style, markup=False)

    def close(self) -> None:
        """Take the view off the screen."""
        if self._live is not None:
            with suppress(OSError):  # the terminal is gone, and the view with it
                self._live.stop()
            self._live = None

    def _on_run_started(self, event: dict[str, Any]) -> None:
        self.close()
        where = f"{ranks_text(event['world_size'])} on {event['device']} ({event['backend']})"
        self.note(f"{event['name']}: {where}, run folder {event['run_dir']}")

    def _on_progress(self, event: dict[str, Any]) -> None:
        """The user's own loop: batch by batch."""
        self._move([f"epoch {event['epoch']} {event['phase']}"], event["batch"] + 1, event["batches"])

    def _on_evaluating(self, event: dict[str, Any]) -> None:
        self._move(["evaluating"], event["batch"], event["batches"])

    def _on_step(self, event: dict[str, Any]) -> None:
        if has_pace(event):
            self._on_pace(event)

    def _on_pace(self, event: dict[str, Any]) -> None:
        texts = [epoch_text(event), *training_texts(self._facts.recorded), speed_text(event["samples_per_s"])]
        self._move([*texts, left_text(left_s(self._facts))], event["step"], event["steps"])

    def _on_epoch(self, event: dict[str, Any]) -> None:
        self.note("  ".join([f"epoch {event['epoch']}", f"step {event['step']}", *measured_texts(event)]))

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.note(f"warning: {event['text']}", style="yellow")

    def _on_straggler(self, event: dict[str, Any]) -> None:
        self.note(event["text"], style="yellow")

    def _on_resumed(self, event: dict[str, Any]) -> None:
        changes = f", with changes: {', '.join(event['changes'])}" if event["changes"] else ""
        self.note(f"going on from step {event['step']} ({event['checkpoint']}){changes}")

    def _on_run_stopped(self, event: dict[str, Any]) -> None:
        self.close()

    def _on_restarted(self, event: dict[str, Any]) -> None:
        self.close()
        self.note(event["text"], style="yellow")

    def _on_run_failed(self, event: dict[str, Any]) -> None:
        """For somebody who watches; the launcher itself tells it once the screen is closed."""
        self.close()
        self.note(event["text"], style="red")

    def _on_run_finished(self, event: dict[str, Any]) -> None:
        self.close()

    def _move(self, texts: list[str], done: int, total: int | None) -> None:
        """There is something new to see: the view draws it soon; elsewhere it is a line now and then."""
        if self.is_live:
            self._open()
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self.note("  ".join([*texts, f"[{done}]" if total is None else f"[{done}/{total}]"]))

    def _open(self) -> None:
        if self._live is None:
            # What goes to this terminal goes above the view; what is piped elsewhere still goes there.
            self._live = Live(
                console=self.console, get_renderable=self._view, refresh_per_second=DRAWN_PER_S, transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )  # fmt: skip
            self._live.start(refresh=True)

    def _view(self) -> RenderableType:
        return view(self._facts, time.monotonic() - self._heard, self.console.width)


def _printable(value: Any) -> Any:
    """A value of an event with all its texts safe to print, the names in it among them."""
    if isinstance(value, dict):
        return {printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
