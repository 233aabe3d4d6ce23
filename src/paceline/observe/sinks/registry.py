"""The names that `log.trackers` accepts: built-in sinks, and entry points of installed packages.

TensorBoard is not listed: it has its own key, `log.tensorboard`, and the launcher feeds it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from paceline.observe.sinks.sink import Sink

GROUP = "paceline.sinks"  # of entry points
# Each name is also the name of the package that the sink needs and of the extra that installs it.
BUILT_IN = {
    "wandb": "paceline.observe.sinks.wandb:WandbSink",
    "mlflow": "paceline.observe.sinks.mlflow:MlflowSink",
}


def problems_with(names: Sequence[str]) -> list[str]:
    """One sentence for each name that is neither built in nor registered; loads no sink."""
    if set(names) <= set(BUILT_IN):
        return []
    known = _entry_points()
    hint = f"use {', '.join(known)}, or install a package that registers it (entry points {GROUP})"
    return [f"log.trackers={name!r} is not known; {hint}" for name in names if name not in known]


def check(names: Sequence[str]) -> None:
    """Raise a ConfigError for names that are not known, and a MissingExtra for a package that is not installed."""
    if problems := problems_with(names):
        raise ConfigError(problems)
    for name in names:
        if name in BUILT_IN and find_spec(name) is None:
            raise MissingExtra(name, name, f"log.trackers={name}")


def open_sink(name: str, run_dir: Path) -> Sink:
    """A new sink for a run; imports the module that is registered under the name."""
    from paceline.observe.sinks.sink import Sink

    entry = _entry_points()[name]
    kind = entry.load()
    if not (isinstance(kind, type) and issubclass(kind, Sink)):
        raise TypeError(f"the entry point {name} = {entry.value} is not a subclass of paceline.Sink")
    return kind(run_dir)


def _entry_points() -> dict[str, EntryPoint]:
    """The entry point of each name; a built-in name cannot be replaced."""
    built_in = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    return {**built_in, **{entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in built_in}}
