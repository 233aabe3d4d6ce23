"""Every error that Paceline raises on purpose.

PacelineError            the training failed                                    exit code 1
├── ConfigError          the config or the command line is wrong                exit code 2
│   ├── TravelError      a function or value cannot be sent to the ranks
│   └── MissingExtra     an optional package is needed and not installed
├── DataError            the data cannot be trained on as it is
├── UnusedParameters     parameters took no part in a step
├── ReplicasDiffer       the ranks no longer hold the same weights
├── NotFinite            the loss or its gradients are NaN or infinite, and the run must not go on
├── CheckpointsDamaged   there are checkpoints and none of them can be used
├── RankFailed           a rank failed; carries the first failure
├── Interrupted          the run was ended by a signal at once, without a checkpoint of its last step
└── Stopped              the run was stopped on request, its state is saved    exit code 3
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any


class PacelineError(Exception):
    """The root of the tree above; `exit_code` is what the command line ends with."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and the attributes; constructors take other arguments, and are not called again."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(PacelineError):
    """One or more mistakes in a config or on the command line, all reported together."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TravelError(ConfigError):
    """Something in the job cannot be pickled; the message names the path to it."""


class MissingExtra(ConfigError):
    """An optional package is missing; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, what_for: str) -> None:
        super().__init__(f"{what_for} needs {package}; run: pip install 'paceline[{extra}]'")


class DataError(PacelineError):
    """The data set cannot be shared among the ranks, or gives what training cannot use."""


class UnusedParameters(PacelineError):
    """Parameters that require a gradient got none in a step."""

    def __init__(self, names: Sequence[str]) -> None:
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"no gradient reached {listed} in this step; if the model leaves parameters out on purpose, "
            "set find_unused_parameters: true, or set requires_grad=False on those that are never used"
        )
        self.names = list(names)


class ReplicasDiffer(PacelineError):
    """The weights of some ranks differ from rank 0's."""

    CAUSE = "something changes weights outside the optimizer, or a device computes wrongly"

    def __init__(self, name: str, ranks: Sequence[int], step: int, cause: str = CAUSE) -> None:
        listed = ", ".join(map(str, ranks))
        super().__init__(
            f"after step {step} the weights of rank {listed} differ from rank 0's, first in {name}; {cause}"
        )


class NotFinite(PacelineError):
    """Loss or gradients of a step are not finite, under `nan: stop` or for `nan_limit` steps in a row."""


class RankFailed(PacelineError):
    """A rank failed. The message is the whole story in a few lines: who, where, what, which log."""


class CheckpointsDamaged(PacelineError):
    """A run has checkpoints and all of them are damaged; it does not begin again by itself."""


class Interrupted(PacelineError):
    """The run was ended by a signal, at once."""


class Stopped(PacelineError, SystemExit):
    """The run was stopped on request and can go on. A script that does not catch this ends with exit code 3."""

    exit_code = 3
    code = 3
