"""The exceptions that Paceline raises, with the exit codes of the command line and of scripts.

PacelineError            training failed                                            exit code 1
├── ConfigError          the config or the command line is wrong                    exit code 2
│   ├── PicklingError    a function or value cannot be pickled for the ranks
│   ├── UnknownAttribute an attribute of another library, or of a result that is not there yet
│   └── MissingExtra     an optional package is needed and not installed
├── DataError            a data set or its files cannot be used; in a run, it becomes a ConfigError
├── UnusedParameters     parameters that require a gradient got none in a step
├── ReplicasDiffer       the weights of the ranks are no longer equal
├── NotFinite            the loss or a gradient is NaN or infinite, and the run stops for it
├── CheckpointsDamaged   the run has checkpoints, and all of them are damaged
├── RankFailed           a rank failed; the message describes the first failure
├── Interrupted          a signal ended the run at once, without a checkpoint of its last step
└── Stopped              the run was stopped on request, and its state is saved     exit code 3
    └── StoppedScript    the same in a script, which then exits without a traceback

In a ConfigError, the config includes the functions that it names, and the data that they return. An error that a script
does not catch is shown without the frames of Paceline, and the script exits with its code.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from paceline.user_code import render


class PacelineError(Exception):
    """The root of the tree above; the command line, and a script that does not catch it, exit with `exit_code`."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows of an error, in place of a traceback with all frames."""
        return render(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and the attributes: unpickling must not call the constructor, which takes other arguments."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(PacelineError):
    """One or more mistakes in a config or on the command line, all reported together."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PicklingError(ConfigError):
    """A function or value of the config cannot be pickled; the message names the path to the part that cannot."""


class UnknownAttribute(ConfigError, AttributeError):
    """An object of Paceline has no such attribute; the message names the one to use."""


class MissingExtra(ConfigError):
    """An optional package is missing; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}; run: pip install 'paceline[{extra}]'")


class DataError(PacelineError):
    """A data set, its samples or its files cannot be used. A run raises it as a ConfigError with the place."""


class UnusedParameters(PacelineError):
    """Parameters that require a gradient got none in a step."""

    def __init__(self, names: Sequence[str]) -> None:
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"no gradient reached {listed} in this step; if the model leaves parameters out on purpose, "
            "set find_unused_parameters: true, or set requires_grad=False on parameters that are never used"
        )
        self.names = list(names)


class ReplicasDiffer(PacelineError):
    """The weights of some ranks differ from those of rank 0."""

    CAUSE = "some code changes weights outside the optimizer, or a device computes wrong results"

    def __init__(self, name: str, ranks: Sequence[int], step: int, cause: str = CAUSE) -> None:
        listed = ", ".join(map(str, ranks))
        super().__init__(
            f"after step {step} the weights of rank {listed} differ from rank 0's, first in {name}; {cause}"
        )


class NotFinite(PacelineError):
    """The loss or a gradient is not finite, with `nan: stop` or in `nan_limit` steps in a row."""


class RankFailed(PacelineError):
    """A rank failed. The message names the rank, its host and step, the error, and the log with the traceback."""


class CheckpointsDamaged(PacelineError):
    """A run has checkpoints and all of them are damaged; it is not restarted from the beginning automatically."""


class Interrupted(PacelineError):
    """A signal ended the run at once, without a checkpoint of its last step."""


class Stopped(PacelineError):
    """The run was stopped on request and can be resumed."""

    exit_code = 3


class StoppedScript(Stopped, SystemExit):
    """Stopped, in a script: Python exits with code 3 if it is not caught. IPython would comment on a SystemExit."""

    code = 3


def handle_uncaught() -> None:
    """Wrap `sys.excepthook`, so that a script ends with the code of an uncaught error, and shows the user's frames.

    A hook that another library has set still shows the error in its own way. One that is set later calls this one, and
    may have redirected stderr for it, so the code is then left to Python. An interactive shell is not ended.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PacelineError) or before is not sys.__excepthook__:
            before(kind, error, trace)
        else:
            print(*render(error), sep="\n", file=sys.stderr, flush=True)
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if isinstance(error, PacelineError) and sys.excepthook is show and not is_interactive:
            sys.exit(error.exit_code)

    sys.excepthook = show
