"""A rank's failure: caught in the rank, written down, and told in a few lines by whoever watches the ranks."""

from __future__ import annotations

import json
import re
import site
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from paceline import errors
from paceline.errors import ConfigError, PacelineError, RankFailed
from paceline.observe.progress import Progress
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.exit_codes import ENDED_EARLY

# What a rank reports when a neighbour is gone. Gloo raises these as plain RuntimeErrors.
NEIGHBOUR_IS_GONE = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Broken pipe|NCCL (error|communicator)|recvValue failed|"
    r"Software caused connection abort|Application timeout caused pair closure"
)
OURS = f"{errors.__name__}."  # before the name of an error of ours, in a traceback
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Code under these folders is never the user's own.
LIBRARIES = tuple(
    {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(__file__).parents[1]),
    }
    | {*site.getsitepackages(), site.getusersitepackages(), "<frozen", "<string>"}
)


HANG = "Hang"  # in place of an error's name: no rank has moved for hang_timeout_s
MISMATCH = "Mismatch"  # the ranks have called different collectives
HOST_LOST = -1000  # in place of an exit code, of ranks on a host that does not answer any more


@dataclass
class Failure:
    """What went wrong in one rank."""

    rank: int
    host: str
    place: str
    error: str
    text: str
    location: str | None
    log: str
    time: float
    is_echo: bool = False  # a neighbour's death, seen from this rank
    is_killed: bool = False  # by a signal; it raised nothing itself
    is_config: bool = False  # a mistake in the config that only a rank could see
    step: int | None = None  # of `place`
    story: str | None = None  # the whole text where several ranks are concerned, with a row for each

    def describe(self) -> str:
        """The block that people read, at most 10 lines; or the story."""
        if self.story is not None:
            return self.story
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
        """One line for the screen, when the ranks start again from the checkpoint of `saved_step`."""
        if self.error == HANG:
            return f"hang: {self.text}"
        end = "lost its neighbour" if self.is_echo else "failed"  # whose host may be gone
        # The place of a rank that was killed is up to a second old.
        is_old = self.step is not None and self.step < saved_step
        return f"rank {self.rank} {end} ({f'after step {saved_step}' if is_old else self.place}): {self.error}"

    def to_error(self) -> PacelineError:
        """What the launcher raises: a ConfigError as the rank raised it, otherwise RankFailed."""
        return ConfigError(self.text.splitlines()) if self.is_config else RankFailed(self.describe())


def capture(error: BaseException, *, rank: int, progress: Progress, folder: RunFolder) -> Failure:
    """The failure that `error` means, from inside the rank."""
    text, name, kind = str(error), type(error).__name__, type(error)
    cause = _worker_cause(text)
    if cause:
        name, text = cause
        if name.startswith(OURS):
            name = name.removeprefix(OURS)
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
        # A network error of the user's own is an OSError, or comes from a DataLoader worker.
        is_echo=isinstance(error, RuntimeError) and cause is None and bool(NEIGHBOUR_IS_GONE.search(text)),
        is_config=issubclass(kind, ConfigError),
        step=progress.step,
    )


def write(failure: Failure, folder: RunFolder, spare: Path | None = None) -> None:
    """Leave the failure where the launcher looks for it; in the folder `spare` if the run folder's disk is full."""
    try:
        write_json(folder.failure(failure.rank), asdict(failure))
    except OSError:
        if spare is None:
            raise
        write_json(spare / folder.failure(failure.rank).name, asdict(failure))


def written(folder: RunFolder, ranks: Iterable[int], spare: Path | None = None) -> dict[int, Failure]:
    """What ranks have written of their failures."""
    paths = {rank: folder.failure(rank) for rank in ranks}
    if spare is not None:
        paths |= {rank: spare / path.name for rank, path in paths.items() if not path.exists()}
    return {r: Failure(**json.loads(p.read_text(encoding="utf-8"))) for r, p in paths.items() if p.exists()}


def first(folder: RunFolder, exit_codes: Mapping[int, int], spare: Path | None = None) -> Failure:
    """The failure that came first and caused the others, from what the ranks wrote and how they ended."""
    told = written(folder, exit_codes, spare)
    ended = [_from_exit_code(r, code, folder) for r, code in sorted(exit_codes.items()) if r not in told and code]
    candidates = sorted(told.values(), key=lambda failure: failure.time)
    own = [failure for failure in candidates if not failure.is_echo]
    # The launcher ends the survivors by SIGTERM, so a death by that signal comes last.
    ended.sort(key=lambda failure: failure.error == "SIGTERM")
    return [*own, *ended, *candidates][0]


def _from_exit_code(rank: int, code: int, folder: RunFolder) -> Failure:
    if code == -9:
        error, text = (
            "SIGKILL",
            "the process was killed; most likely the machine ran out of memory (see `dmesg`)",
        )
    elif code == HOST_LOST:
        error, text = "HostLost", "its host does not answer any more"
    elif code == ENDED_EARLY:
        error, text = (
            "Exit",
            "the process ended with exit code 0 before the run was over; something called os._exit or exec",
        )
    elif code < 0:
        names = {signal.value: signal.name for signal in Signals}  # real-time signals have none
        error, text = names.get(-code, "Signal"), f"the process was ended by signal {-code}"
    else:
        error, text = "Exit", f"the process ended with exit code {code}"
    tail = [line for line in _tail(folder.log(rank)) if line.strip()]
    last = _last_place(folder.place(rank))
    return Failure(
        rank=rank,
        host=last.get("host") or socket.gethostname(),
        place=f"last seen {last['place']}" if last else "place unknown",
        error=error,
        text="\n".join([text, *(f"last output: {line}" for line in tail[-1:])]),
        location=last.get("location"),
        log=str(folder.log(rank)),
        time=time.time(),
        is_killed=code < 0 and code != ENDED_EARLY,
        step=last.get("step"),
    )


def _last_place(path: Path) -> dict[str, Any]:
    """What a rank told of itself a moment before it ended, if anything."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            # What faulthandler dumps when a process crashes is for the log alone.
            return file.read().decode(errors="replace").partition("Fatal Python error: ")[0].splitlines()
    except OSError:
        return []


def _worker_cause(text: str) -> tuple[str, str] | None:
    """The type and text of an error that a DataLoader worker sent as a formatted traceback."""
    if "Original Traceback" not in text:
        return None
    last = text.strip().rpartition("Traceback (most recent call last):\n")[2]
    match = re.search(r"^(\w[\w.]*)(?:: (.*))?\Z", last, re.M | re.S)
    return (match[1], match[2] or "") if match else None


def user_location(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of the user's own code."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # A DataLoader worker's error carries its frames as text.
    frames += [(match[1], int(match[2])) for match in FRAME.finditer(str(error))]
    for filename, line in reversed(frames):
        if not filename.startswith(LIBRARIES):
            return f"{filename}:{line}"
    return None
