"""Shows the events of a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from paceline.formatting import printable, ranks_text
from paceline.observe.event_types import complete
from paceline.observe.screen.live import (
    LiveState,
    after,
    epoch_text,
    has_pace,
    left_s,
    left_text,
    metric_texts,
    speed_text,
    training_texts,
    view,
)

PLAIN_INTERVAL_S = 3.0  # between two plain lines
REFRESH_PER_S = 4  # of the live view


class Screen:
    """Shows a run to the user. Progress goes to stderr, the output of rank 0 to stdout."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, force_jupyter=False, highlight=False, soft_wrap=True)
        # The streams of a notebook claim to be terminals, but cannot move a cursor.
        is_own_stream = sys.stderr is sys.__stderr__
        self.is_live = is_own_stream and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live: Live | None = None
        self._state = LiveState()  # replaced as a whole: the thread that draws the view reads it
        self._updated = self._last_plain = time.monotonic()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event; events without a handler below are not shown."""
        event = complete(_printable(event))
        before, self._state = self._state, after(self._state, event)
        if self._state.updated != before.updated:
            self._updated = time.monotonic()
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def line(self, text: str) -> None:
        """Print one line of the output of rank 0; on a terminal, above the view."""
        print(text, flush=True)

    def note(self, text: str, style: str = "") -> None:
        """Print one line of Paceline's own output."""
        self.console.print(printable(text), style=style, markup=False)

    def close(self) -> None:
        """Remove the view from the screen."""
        if self._live is not None:
            with suppress(OSError):  # the terminal was closed, and the view with it
                self._live.stop()
            self._live = None

    def _on_run_started(self, event: dict[str, Any]) -> None:
        self.close()
        where = f"{ranks_text(event['world_size'])} on {event['device']} ({event['backend']})"
        self.note(f"{event['name']}: {where}, run folder {event['run_dir']}")

    def _on_progress(self, event: dict[str, Any]) -> None:
        """Show a pass of the user's own loop."""
        self._show_progress([f"epoch {event['epoch']} {event['phase']}"], event["batch"] + 1, event["batches"])

    def _on_evaluating(self, event: dict[str, Any]) -> None:
        self._show_progress(["evaluating"], event["batch"], event["batches"])

    def _on_step(self, event: dict[str, Any]) -> None:
        if has_pace(event):
            self._on_pace(event)

    def _on_pace(self, event: dict[str, Any]) -> None:
        texts = [epoch_text(event), *training_texts(self._state.recorded), speed_text(event["samples_per_s"])]
        self._show_progress([*texts, left_text(left_s(self._state))], event["step"], event["steps"])

    def _on_epoch(self, event: dict[str, Any]) -> None:
        self.note("  ".join([f"epoch {event['epoch']}", f"step {event['step']}", *metric_texts(event)]))

    def _on_evaluation(self, event: dict[str, Any]) -> None:
        self._on_epoch(event)

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.note(f"warning: {event['text']}", style="yellow")

    def _on_step_mode(self, event: dict[str, Any]) -> None:
        self.note(event["text"])

    def _on_mirror(self, event: dict[str, Any]) -> None:
        self.note(f"mirror: {event['text']}")

    def _on_save_interval(self, event: dict[str, Any]) -> None:
        self.note(event["text"])

    def _on_straggler(self, event: dict[str, Any]) -> None:
        self.note(event["text"], style="yellow")

    def _on_resumed(self, event: dict[str, Any]) -> None:
        changes = f", with changes: {', '.join(event['changes'])}" if event["changes"] else ""
        self.note(f"resuming from step {event['step']} ({event['checkpoint']}){changes}")

    def _on_run_stopped(self, event: dict[str, Any]) -> None:
        self.close()

    def _on_restarted(self, event: dict[str, Any]) -> None:
        self.close()
        self.note(event["text"], style="yellow")

    def _on_run_failed(self, event: dict[str, Any]) -> None:
        """For `paceline watch`; the launcher prints the failure itself after it has closed the screen."""
        self.close()
        self.note(event["text"], style="red")

    def _on_run_finished(self, event: dict[str, Any]) -> None:
        self.close()
        if "reason" in event:
            self.note(f"finished early: {event['reason']}")

    def _show_progress(self, texts: list[str], done: int, total: int | None) -> None:
        """Show progress: open the view on a terminal; elsewhere print a line every few seconds."""
        if self.is_live:
            self._open()
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self.note("  ".join([*texts, f"[{done}]" if total is None else f"[{done}/{total}]"]))

    def _open(self) -> None:
        if self._live is None:
            # Output to this terminal is printed above the view; output that is piped elsewhere is left alone.
            self._live = Live(
                console=self.console, get_renderable=self._view, refresh_per_second=REFRESH_PER_S, transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )  # fmt: skip
            self._live.start(refresh=True)

    def _view(self) -> RenderableType:
        return view(self._state, time.monotonic() - self._updated, self.console.width)


def _printable(value: Any) -> Any:
    """A value of an event in which all texts, including field names, are safe to print."""
    if isinstance(value, dict):
        return {printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
