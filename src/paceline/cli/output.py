"""Tables and errors on the terminal, and the choice of the process that prints them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from paceline.formatting import printable, redacted


def is_main() -> bool:
    """Whether this process prints; of several processes that run the same command, only one does."""
    from paceline.launch.environment import is_main_process

    return is_main_process()


def show_table(table: Table) -> None:
    """Print a table as wide as the terminal; in files and pipes 240 columns wide, so that rows are not folded."""
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)


def print_error(text: str) -> None:
    """Print an error to stderr, in red on a terminal."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"paceline: {printable(redacted(text))}", style="red", markup=False
    )
