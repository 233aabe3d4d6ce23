"""The failure of a rank: captured and written to a file in the rank, read and described by the launcher."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from paceline import errors
from paceline.errors import ConfigError, PacelineError, RankFailed
from paceline.observe.progress import Progress
from paceline.observe.rank_log import read_end
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.processes import ENDED_EARLY
from paceline.user_code import user_location

# Errors that a rank raises because another rank has ended. Gloo raises them as plain RuntimeErrors.
OTHER_RANK_ENDED = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Broken pipe|NCCL (error|communicator)|recvValue failed|"
    r"Software caused connection abort|Application timeout caused pair closure"
)
OWN_ERRORS = f"{errors.__name__}."  # precedes the name of an error of Paceline in a traceback


HANG = "Hang"  # in place of an error's name: no rank has made progress for hang_timeout_s
MISMATCH = "Mismatch"  # in place of an error's name: the ranks have called different collectives
HOST_LOST = -1000  # in place of an exit code: the rank's host no longer responds


@dataclass
class Failure:
    """The failure of one rank."""

    rank: int
    host: str
    place: str  # the position in the run, as Progress.describe returns it
    error: str
    text: str
    location: str | None
    log: str
    time: float
    is_echo: bool = False  # only a consequence: another rank has ended
    is_killed: bool = False  # by a signal; the rank raised no error
    is_config: bool = False  # a mistake in the config that only a rank can find
    step: int | None = None  # of `place`
    report: str | None = None  # the complete text if several ranks are involved, with a row for each rank

    def describe(self) -> str:
        """The text for the user: `report`, or a block of at most 10 lines."""
        if self.report is not None:
            return self.report
        lines = [line for line in self.text.strip().splitlines() if line.strip()] or [""]
        if len(lines) > 5:
            lines = [*lines[:4], f"… {len(lines) - 4} more lines in the log"]
        lines = [line if len(line) <= 300 else line[:297] + "..." for line in lines]
        block = [f"rank {self.rank} on {self.host} failed ({self.place})", f"  {self.error}: {lines[0]}"]
        block += [f"  {line}" for line in lines[1:]]
        if self.location:
            block.append(f"  at {self.location}")
        block.append(f"  full log: {self.log}")
        return "\n".join(block)

    def summarize(self, saved_step: int) -> str:
        """One line for the screen, shown when the ranks restart from the checkpoint of `saved_step`."""
        if self.error == HANG:
            return f"hang: {self.text}"
        verb = "lost another rank" if self.is_echo else "failed"
        # The position of a rank that was killed is up to a second old.
        is_old = self.step is not None and self.step < saved_step
        return f"rank {self.rank} {verb} ({f'after step {saved_step}' if is_old else self.place}): {self.error}"

    def to_error(self) -> PacelineError:
        """The error that the launcher raises: a ConfigError if the rank raised one, otherwise RankFailed."""
        return ConfigError(self.text.splitlines()) if self.is_config else RankFailed(self.describe())


def capture(error: BaseException, *, rank: int, progress: Progress, folder: RunFolder) -> Failure:
    """Describe an error as the failure of this rank; called inside the rank."""
    text, name, kind = str(error), type(error).__name__, type(error)
    cause = _worker_cause(text)
    if cause:
        name, text = cause
        if name.startswith(OWN_ERRORS):
            name = name.removeprefix(OWN_ERRORS)
            kind = getattr(errors, name)
    if isinstance(error, SystemExit):
        text = f"sys.exit({error.code}) was called during the run"
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        place=progress.describe(),
        error=name,
        text=text,
        location=user_location(error),
        log=str(folder.log(rank)),
        time=time.time(),
        # A network error in the user's code is an OSError, or raised in a DataLoader worker.
        is_echo=isinstance(error, RuntimeError) and cause is None and bool(OTHER_RANK_ENDED.search(text)),
        is_config=issubclass(kind, ConfigError),
        step=progress.step,
    )


def write(failure: Failure, folder: RunFolder, spare: Path | None = None) -> None:
    """Write the failure to the run folder for the launcher, or to the folder `spare` if that disk is full."""
    try:
        write_json(folder.failure(failure.rank), asdict(failure))
    except OSError:
        if spare is None:
            raise
        write_json(spare / folder.failure(failure.rank).name, asdict(failure))


def read(folder: RunFolder, ranks: Iterable[int], spare: Path | None = None) -> dict[int, Failure]:
    """The failures that ranks have written, by rank."""
    paths = {rank: folder.failure(rank) for rank in ranks}
    if spare is not None:
        paths |= {rank: spare / path.name for rank, path in paths.items() if not path.exists()}
    return {r: Failure(**json.loads(p.read_text(encoding="utf-8"))) for r, p in paths.items() if p.exists()}


def first(folder: RunFolder, exit_codes: Mapping[int, int], spare: Path | None = None) -> Failure:
    """The failure that caused the others, according to the ranks' failure files and exit codes."""
    written = read(folder, exit_codes, spare)
    ended = [_from_exit_code(r, code, folder) for r, code in sorted(exit_codes.items()) if r not in written and code]
    candidates = sorted(written.values(), key=lambda failure: failure.time)
    own = [failure for failure in candidates if not failure.is_echo]
    # The launcher ends the remaining ranks by SIGTERM, so that signal is the least likely cause.
    ended.sort(key=lambda failure: failure.error == "SIGTERM")
    return [*own, *ended, *candidates][0]


def _from_exit_code(rank: int, code: int, folder: RunFolder) -> Failure:
    if code == -9:
        error, text = (
            "SIGKILL",
            "the process was killed; most likely the machine ran out of memory (see `dmesg`)",
        )
    elif code == HOST_LOST:
        error, text = "HostLost", "its host no longer responds"
    elif code == ENDED_EARLY:
        error, text = (
            "Exit",
            "the process ended with exit code 0 before the run was over; the code called os._exit or exec",
        )
    elif code < 0:
        names = {signal.value: signal.name for signal in Signals}  # real-time signals have no name
        error, text = names.get(-code, "Signal"), f"the process was terminated by signal {-code}"
    else:
        error, text = "Exit", f"the process ended with exit code {code}"
    # The stacks that faulthandler dumps when a process crashes are for the log only.
    output = read_end(folder.log(rank), limit=1 << 16).partition("Fatal Python error: ")[0]
    lines = [line for line in output.splitlines() if line.strip()]
    last = _last_position(folder.place(rank))
    return Failure(
        rank=rank,
        host=last.get("host") or socket.gethostname(),
        place=f"last seen {last['place']}" if last else "position unknown",
        error=error,
        text="\n".join([text, *(f"last output: {line}" for line in lines[-1:])]),
        location=last.get("location"),
        log=str(folder.log(rank)),
        time=time.time(),
        is_killed=code < 0 and code != ENDED_EARLY,
        step=last.get("step"),
    )


def _last_position(path: Path) -> dict[str, Any]:
    """The position that a rank wrote last; empty if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def _worker_cause(text: str) -> tuple[str, str] | None:
    """The type and text of an error that a DataLoader worker sent as a formatted traceback."""
    if "Original Traceback" not in text:
        return None
    last = text.strip().rpartition("Traceback (most recent call last):\n")[2]
    match = re.search(r"^(\w[\w.]*)(?:: (.*))?\Z", last, re.M | re.S)
    return (match[1], match[2] or "") if match else None


@contextmanager
def raising_config_errors(what: str) -> Iterator[None]:
    """Raise an error of a user's function as a ConfigError if a restart would raise it again."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = user_location(error)
        where = f" ({place})" if place else ""
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error}{where}; fix it: a restart would raise it again"
        ) from error
