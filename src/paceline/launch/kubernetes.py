"""A host that is a pod of an Indexed Job of Kubernetes (`paceline submit --kubernetes`).

The pod of index 0 is the coordinator. The Job replaces a pod that is lost, or that ends with any exit code but 0, 1 and
2; the new pod has the same index and name, and another address.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from paceline.checkpoint.resume import find_restore_point
from paceline.config import Config
from paceline.errors import ConfigError, PacelineError, Stopped
from paceline.launch import network
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome, collect
from paceline.system.signals import StopRequest, listening

INDEX = "JOB_COMPLETION_INDEX"
RETRY_S = 0.5
LOG_S = 10.0


def index() -> int | None:
    """The index of this pod in its Job; None outside of an Indexed Job."""
    text = os.environ.get(INDEX)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{INDEX}={text} is not a number; leave it to Kubernetes, which sets it in an Indexed Job")
    return int(text)


def retried(error: PacelineError) -> PacelineError:
    """What a host raises where a later start may succeed: in a pod, an error whose exit code makes the Job replace it.

    Only for errors that occur while no rank is running, so that nothing is left to save.
    """
    return error if index() is None else Stopped(f"{error}; Kubernetes replaces this pod")


def listen(rendezvous: str, timeout_s: float, log: Callable[[str], None]) -> socket.socket:
    """A socket that listens at the rendezvous, which becomes an address of this pod some time after its start.

    Until then the name is unknown, or has the address of the pod that this one replaces.
    """
    request, began, logged_at = StopRequest(), time.monotonic(), 0.0
    with listening(request, "nothing was running"):
        while not request.signal:
            try:
                bound = network.listen(*network.address_in(rendezvous))
            except network.UnknownHost:
                bound = None
            if bound is not None:
                return bound
            now = time.monotonic()
            if now - began > timeout_s:
                raise retried(ConfigError(f"after {timeout_s:.0f} s {rendezvous} is no address of this pod (index 0)"))
            if now - logged_at > LOG_S:
                logged_at = now
                log(f"waiting until {rendezvous} is an address of this pod")
            time.sleep(RETRY_S)
    raise request.stopped("before it began")


def finished(config: Config) -> Outcome | None:
    """The outcome, if this run has finished: the pod was lost when the others had ended already."""
    if index() is None or config.resume != "auto" or config.run_dir is None:
        return None
    folder = RunFolder(config.run_dir.resolve())
    if not (folder.has_result() and folder.config.exists()):
        return None
    point = find_restore_point(config.model_copy(update={"resume": str(folder.path)}))
    settled = config.model_copy(update={"lanes": point.lanes(config), "threads": point.threads(config)})
    # With another config it has finished earlier, and is trained for longer now.
    return collect(folder) if folder.config.read_text(encoding="utf-8") == settled.to_yaml() else None
