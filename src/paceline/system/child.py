"""The command of another Python process that runs a part of this very Paceline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Nothing of the working folder: a file there may be called like a module of Python's.
CODE = (
    "import sys; home, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path = [home, *filter(None, sys.path)]; "
    "import importlib, paceline; del sys.path[0]; importlib.import_module(module).main()"
)


def command_of(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """What starts `main()` of a module, which finds these arguments in `sys.argv`; the options are Python's own."""
    return [sys.executable, "-u", *options, "-c", CODE, str(Path(__file__).parents[2]), module, *arguments]
