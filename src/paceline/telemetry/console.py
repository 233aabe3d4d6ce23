"""The screen: a live bar on a terminal, plain lines elsewhere, from the events of a run."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_INTERVAL_S = 3.0


class Screen:
    """Shows a run to a person. Progress goes to stderr, what rank 0 prints goes to stdout."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, force_jupyter=False, highlight=False, soft_wrap=True)
        # A notebook's streams call themselves terminals, but they cannot move a cursor.
        is_own_stream = sys.stderr is sys.__stderr__
        self.is_live = is_own_stream and self.console.is_terminal and not self.console.is_dumb_terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_plain = time.monotonic()
        self._facts: dict[str, Any] = {}

    def show(self, event: dict[str, Any]) -> None:
        """React to one event; kinds it does not know are not for the screen."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def line(self, text: str) -> None:
        """One line that rank 0 printed."""
        if self._bar is not None and sys.stdout.isatty():
            self._bar.console.print(text, markup=False)
        else:
            print(text, flush=True)

    def note(self, text: str, style: str = "") -> None:
        """One line from Paceline itself."""
        self.console.print(text, style=style, markup=False)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _on_run_started(self, event: dict[str, Any]) -> None:
        ranks = "1 rank" if event["world_size"] == 1 else f"{event['world_size']} ranks"
        self.note(f"{event['name']}: {ranks} on {event['device']} ({event['backend']}), run folder {event['run_dir']}")

    def _on_progress(self, event: dict[str, Any]) -> None:
        """The user's own loop: batch by batch."""
        text = f"epoch {event['epoch'] + 1} {event['phase']}"
        self._move(text, event["batch"] + 1, event["batches"])

    def _on_evaluating(self, event: dict[str, Any]) -> None:
        self._move("evaluating", event["batch"], event["batches"])

    def _on_step(self, event: dict[str, Any]) -> None:
        speed = f"{event['samples_per_s']:,.0f} samples/s"
        loss = "-" if event["loss"] is None else f"{event['loss']:.4f}"
        text = f"epoch {event['epoch'] + 1}/{event['epochs']}  loss {loss}  {speed}"
        self._move(text, event["step"], event["steps"])

    def _on_epoch(self, event: dict[str, Any]) -> None:
        measured = {k: v for k, v in event.items() if isinstance(v, float) and k != "time"}
        facts = "  ".join(f"{name} {value:.4f}" for name, value in measured.items())
        self.note(f"epoch {event['epoch'] + 1}  step {event['step']}  {facts}")

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.note(f"warning: {event['text']}", style="yellow")

    def _on_resumed(self, event: dict[str, Any]) -> None:
        changes = f", with changes: {', '.join(event['changes'])}" if event["changes"] else ""
        self.note(f"going on from step {event['step']} ({event['checkpoint']}){changes}")

    def _on_restarted(self, event: dict[str, Any]) -> None:
        self.note(event["text"], style="yellow")

    def _on_run_failed(self, event: dict[str, Any]) -> None:
        """For somebody who watches; the launcher itself tells it once the screen is closed."""
        self.close()
        self.note(event["text"], style="red")

    def _on_run_finished(self, event: dict[str, Any]) -> None:
        self.close()

    def _move(self, text: str, done: int, total: int | None) -> None:
        if self.is_live:
            if self._bar is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
                counts = (
                    MofNCompleteColumn(),
                    TimeElapsedColumn(),
                    TimeRemainingColumn(),
                )
                self._bar = Progress(*columns, *counts, console=self.console, transient=True)
                self._bar.start()
                self._task = self._bar.add_task(text, total=total)
            assert self._task is not None
            self._bar.update(self._task, description=text, completed=done, total=total)
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self.note(f"{text}  [{done}]" if total is None else f"{text}  [{done}/{total}]")
