"""The charts of a report: which curves are drawn together, and in which order (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.tools.report.facts import RunFacts

LOSSES = ("loss", "train_loss", "val_loss")
# What Paceline measures in every run. All other numbers are losses and metrics.
MEASURED = {
    "lr": "learning rate",
    "samples_per_s": "samples per second",
    "grad_norm": "gradient norm",
    "memory_mb": "memory of the largest rank, MB",
}


@dataclass(frozen=True)
class Chart:
    """A title, and the names of the curves that are drawn together."""

    title: str
    names: list[str]


def charts_of(runs: Sequence[RunFacts]) -> list[Chart]:
    """The charts of all curves: the losses, then metrics of epochs, then numbers of steps."""
    names = _union(run.curves for run in runs)
    losses = [name for name in LOSSES if name in names and not (name == "train_loss" and "loss" in names)]
    others = [name for name in names if name not in LOSSES]
    of_epochs = [name for name in others if any(name in run.curves and run.curves[name].per == "epoch" for run in runs)]
    of_steps = [name for name in others if name not in of_epochs]
    single = [Chart(MEASURED.get(name, name), [name]) for name in (*of_epochs, *of_steps)]
    return [Chart("loss", losses), *single] if losses else single


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))
