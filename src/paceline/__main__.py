"""The `paceline` command, also as `python -m paceline`."""

import sys

from paceline.system.signals import defer_requests


def main() -> None:
    """Import the command line and run it; a request to stop `train` is accepted even during the imports."""
    if sys.argv[1:2] == ["train"]:
        defer_requests()
    from paceline.cli import main as run

    run()


if __name__ == "__main__":
    main()
