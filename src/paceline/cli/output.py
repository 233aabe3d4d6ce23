"""What commands print alike: tables, and the words of an error; and who prints at all."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from paceline.formatting import printable


def is_main() -> bool:
    """Whether this process speaks for all: of several that were started alike, one does."""
    from paceline.launch.environment import is_main_process

    return is_main_process()


def show_table(table: Table) -> None:
    """A table as wide as the terminal; in files and pipes, where nobody wants it folded, as wide as it must be."""
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)


def print_error(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"paceline: {printable(text)}", style="red", markup=False
    )
