"""The report of a search: a row for each trial, their ranking, a table and plots."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.run.atomic_files import write_text
from paceline.tools.tune.goal import Goal

if TYPE_CHECKING:
    import optuna

LEAST_FOR_IMPORTANCE = 5  # fewer different values do not show the importance of keys


@dataclass(frozen=True)
class TrialRow:
    """One trial, as a row of the table."""

    number: int
    values: dict[str, Any]
    value: float | None  # of the goal's metric; the last one if the trial was pruned
    state: str  # done, pruned, failed or running
    epochs: int
    seconds: float
    run_dir: str
    reason: str = ""

    def describe(self, goal: Goal) -> str:
        """The trial in one line."""
        value = "" if self.value is None else f"  {goal.metric} {self.value:.6g}"
        values = "  ".join(f"{key} {shown(value)}" for key, value in self.values.items())
        reason = f": {first_words(self.reason)}" if self.reason else ""
        return f"trial {self.number}  {self.state}{value}  {self.seconds:.1f} s  {values}{reason}"


def shown(value: Any) -> str:
    """A value as text, with four digits if it is a fraction."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def first_words(reason: str, limit: int = 160) -> str:
    """The first two lines of a reason, which name the rank and the error, as one line."""
    text = " ".join(line.strip() for line in reason.splitlines()[:2])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def best_of(rows: Sequence[TrialRow], goal: Goal) -> TrialRow | None:
    """The best trial that finished; None if there is none."""
    best = next(iter(ranking(rows, goal)), None)
    return best if best is not None and best.state == "done" else None


def ranking(rows: Sequence[TrialRow], goal: Goal) -> list[TrialRow]:
    """The trials, best first: those that finished, then the others by their number of epochs."""
    order = ("done", "pruned", "running", "failed")

    def key(row: TrialRow) -> tuple[float, ...]:
        cost = goal.cost(row.value) if row.value is not None else 0.0
        return (order.index(row.state), cost if row.state == "done" else -row.epochs, cost, row.number)

    return sorted(rows, key=key)


def write_table(path: Path, rows: Sequence[TrialRow], goal: Goal) -> None:
    """Write all trials as CSV."""
    text = io.StringIO()
    keys = list(rows[0].values) if rows else []
    table = csv.writer(text)
    table.writerow(["trial", "state", goal.metric, "epochs", "seconds", *keys, "run_dir", "reason"])
    for row in rows:
        facts = [row.number, row.state, "" if row.value is None else row.value, row.epochs, row.seconds]
        table.writerow([*facts, *(row.values.get(key) for key in keys), row.run_dir, first_words(row.reason)])
    write_text(path, text.getvalue())


def write_plots(path: Path, study: optuna.Study, metric: str) -> str | None:
    """Write Optuna's plots to one page, which works offline; returns the reason if it cannot."""
    if find_spec("plotly") is None:
        return "no plots: plotly is not installed; pip install 'paceline[tune]'"
    from optuna import visualization as plots
    from optuna.importance import PedAnovaImportanceEvaluator  # the only evaluator without further dependencies

    figures = [
        plots.plot_optimization_history(study, target_name=metric),
        plots.plot_parallel_coordinate(study, target_name=metric),
        plots.plot_slice(study, target_name=metric),
    ]
    if any(trial.intermediate_values for trial in study.trials):
        figures.insert(1, plots.plot_intermediate_values(study))
    if len({trial.value for trial in study.trials if trial.state.name == "COMPLETE"}) >= LEAST_FOR_IMPORTANCE:
        evaluator = PedAnovaImportanceEvaluator()
        figures.append(plots.plot_param_importances(study, evaluator=evaluator, target_name=metric))
    pages = [figure.to_html(full_html=False, include_plotlyjs=n == 0) for n, figure in enumerate(figures)]
    name = html.escape(study.study_name)
    title = f"<title>{name}</title><h1>{name}</h1>"
    write_text(path, f'<!doctype html>\n<meta charset="utf-8">{title}\n' + "\n".join(pages))
    return None
