"""What to request from Kubernetes, and what is wrong with it: every value is checked before anything is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from paceline.errors import ConfigError

LONGEST_NAME = 40  # Kubernetes appends an index and more, up to 63 characters
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){LABEL.pattern}(\.{LABEL.pattern})*")
IMAGE = re.compile(
    r"(?=.{1,500}\Z)"
    r"([a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?)*(:[0-9]+)?/)?"  # registry
    r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*"  # path
    r"(:\w[\w.-]{0,127})?(@[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-fA-F]{32,})?",  # tag, digest
    re.ASCII,
)
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)", re.ASCII)
MEMORY_UNITS: dict[str, int] = {
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
}
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", re.ASCII)
MOST = 2**31 - 1  # of a count or of seconds
MOST_NODES = 9_999
SYSTEM = ("/dev", "/proc", "/sys", "/etc")  # a volume there would hide what a container needs
# Fields of a pod that the manifest has already.
WRITTEN = (
    "containers", "enableServiceLinks", "hostname", "restartPolicy", "subdomain", "terminationGracePeriodSeconds",
    "volumes",
)  # fmt: skip


class Volume(NamedTuple):
    """A PersistentVolumeClaim, and the folder of the pods at which it is mounted."""

    claim: str
    path: str


@dataclass(frozen=True)
class PodsRequest:
    """The pods of a run, one for each node."""

    image: str | None
    volumes: Sequence[str] = ()  # CLAIM:PATH
    nodes: int = 1
    namespace: str | None = None
    gpus_per_node: int | None = None
    cpu: str | None = None
    memory: str | None = None
    secrets: Sequence[str] = ()
    procs: str | None = None
    time: str | None = None
    notice_s: int = 120  # to save in, before a pod is killed
    max_requeues: int = 100  # of each pod
    pod: Mapping[str, Any] = field(default_factory=dict)  # further fields of the pods

    def check(self) -> None:
        """Raise a ConfigError with everything that is wrong."""
        if problems := [*self._problems()]:
            raise ConfigError(problems)

    @property
    def mounts(self) -> list[Volume]:
        """The volumes, of which the same claim may be mounted twice."""
        return [Volume(*text.partition(":")[::2]) for text in self.volumes]

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds, from a text that Slurm also reads."""
        return None if self.time is None else seconds_in(self.time)

    def _problems(self) -> Iterator[str]:
        if not self.image:
            yield "the pods need a container image with Paceline in it; give --image REGISTRY/NAME:TAG"
        elif not IMAGE.fullmatch(self.image):
            yield f"--image {self.image!r} is not the name of a container image, such as ghcr.io/lab/train:1.2"
        if self.namespace is not None and not LABEL.fullmatch(self.namespace):
            yield f"--namespace {self.namespace!r} must consist of at most 63 of a-z, 0-9 and -, with no - at its ends"
        for secret in self.secrets:
            if not SUBDOMAIN.fullmatch(secret):
                yield f"--secret {secret!r} must consist of a-z, 0-9, - and ., as names in Kubernetes do"
        yield from self._problems_with_volumes()
        yield from self._problems_with_resources()
        for name, value, least, most in (
            ("nodes", self.nodes, 1, MOST_NODES), ("gpus-per-node", self.gpus_per_node or 0, 0, MOST),
            ("notice", self.notice_s, 1, MOST), ("max-requeues", self.max_requeues, 0, MOST),
        ):  # fmt: skip
            if not least <= value <= most:
                yield f"--{name} {value} must be a number from {least} to {most}"
        if self.time is not None and not 1 <= (seconds_in(self.time) or 0) <= MOST:
            yield f"--time {self.time!r} is not a time limit; write MINUTES, H:MM:SS or DAYS-HOURS, such as 4:00:00"
        if taken := sorted(set(self.pod) & set(WRITTEN)):
            yield f"--pod sets {', '.join(taken)}, which the manifest sets itself; remove it from the file"

    def _problems_with_volumes(self) -> Iterator[str]:
        if not self.volumes:
            yield (
                "the pods need a shared folder for the run, which outlives them; give --volume CLAIM:PATH, the name of "
                "a PersistentVolumeClaim and where to mount it"
            )
        paths = [path for _, path in self.mounts]
        for text, (claim, path) in zip(self.volumes, self.mounts, strict=True):
            if not SUBDOMAIN.fullmatch(claim) or not _is_mount(path):
                yield f"--volume {text!r} must be CLAIM:PATH with an absolute path, such as lab-data:/shared"
            elif any(PurePosixPath(path).is_relative_to(folder) for folder in SYSTEM):
                yield f"--volume {text!r} would hide {path} of the system; mount it in another folder"
            elif paths.count(path) > 1:
                yield f"--volume {text!r} is mounted where another volume is; choose another folder"

    def _problems_with_resources(self) -> Iterator[str]:
        if self.cpu is not None and not _cpu_in(self.cpu):
            yield f"--cpu {self.cpu!r} is not a number of cores; write, for example, 8, 0.5 or 500m"
        if self.memory is not None and (_bytes_in(self.memory) or 0) < MEMORY_UNITS["Mi"]:
            yield f"--memory {self.memory!r} is not an amount of memory of 1Mi or more; write, for example, 64Gi"


def _is_mount(path: str) -> bool:
    """Whether a volume can be mounted there."""
    is_plain = path.isprintable() and not set(path) & {":", ","} and "/../" not in f"{path}/"
    return is_plain and path.startswith("/") and path != "/" and str(PurePosixPath(path)) == path


def _cpu_in(text: str) -> Decimal | None:
    """The number of cores, None if there are none or the text means something else."""
    found = QUANTITY.fullmatch(text)
    if found is None or found[2] not in ("", "m"):
        return None
    cores: Decimal = Decimal(found[1]) / (1000 if found[2] else 1)
    return cores if cores >= Decimal("0.001") else None  # Kubernetes counts thousandths


def _bytes_in(text: str) -> Decimal | None:
    """The number of bytes, None if the text means something else."""
    found = QUANTITY.fullmatch(text)
    if found is None or found[2] not in ("", *MEMORY_UNITS):
        return None
    return Decimal(found[1]) * MEMORY_UNITS.get(found[2], 1)


def seconds_in(text: str) -> int | None:
    """The seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as Slurm reads them; None for another text."""
    found = TIME.fullmatch(text)
    if found is None:
        return None
    numbers = [int(number) for number in found["rest"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        hours += 24 * int(found["days"])
    else:
        hours, minutes, seconds = ([0, *numbers, 0] if len(numbers) < 3 else numbers)[:3]
    return 3600 * hours + 60 * minutes + seconds


def job_name(config_name: str, folder_name: str) -> str:
    """The name of a run's job: of its config and its folder, as far as Kubernetes takes their characters (pure)."""
    words = [re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (config_name, folder_name)]
    name = "-".join(dict.fromkeys(filter(None, words)))
    if not name[:1].isalpha():  # as the name of a service must
        name = f"run-{name}".strip("-")
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{name[: LONGEST_NAME - 7].rstrip('-')}-{digest}"
    return name
