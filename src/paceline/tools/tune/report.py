"""What a search has found: a row for each trial, the best config, plots."""

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

ENOUGH = 5  # trials that say something about which keys matter


@dataclass(frozen=True)
class Row:
    """One trial."""

    number: int
    values: dict[str, Any]
    value: float | None  # of the goal's metric; of a pruned trial, the last one
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
    """A value as people like to read it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def first_words(reason: str, limit: int = 160) -> str:
    """The beginning of a reason, on one line: who failed, and of what."""
    text = " ".join(line.strip() for line in reason.splitlines()[:2])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def best_of(rows: Sequence[Row], goal: Goal) -> Row | None:
    """The best trial that was trained to its end."""
    best: Row | None = None
    for row in rows:
        if row.state == "done" and row.value is not None:
            is_better = best is None or best.value is None or goal.is_better(row.value, best.value)
            best = row if is_better else best
    return best


def ranking(rows: Sequence[Row], goal: Goal) -> list[Row]:
    """The trials, best first: those that were trained to their end, then others by how far they came."""
    sign = 1 if goal.mode == "min" else -1
    order = ("done", "pruned", "running", "failed")

    def place(row: Row) -> tuple[float, ...]:
        worth = sign * row.value if row.value is not None else 0.0
        return (order.index(row.state), worth if row.state == "done" else -row.epochs, worth, row.number)

    return sorted(rows, key=place)


def write_table(path: Path, rows: Sequence[Row], goal: Goal) -> None:
    """All trials as CSV."""
    text = io.StringIO()
    keys = list(rows[0].values) if rows else []
    table = csv.writer(text)
    table.writerow(["trial", "state", goal.metric, "epochs", "seconds", *keys, "run_dir", "reason"])
    for row in rows:
        facts = [row.number, row.state, "" if row.value is None else row.value, row.epochs, row.seconds]
        table.writerow([*facts, *(row.values.get(key) for key in keys), row.run_dir, first_words(row.reason)])
    write_text(path, text.getvalue())


def write_plots(path: Path, study: optuna.Study, metric: str) -> str | None:
    """Optuna's plots on one page, which needs no network; a reason if there are none."""
    if find_spec("plotly") is None:
        return "no plots, which need plotly: pip install 'paceline[tune]'"
    from optuna import visualization as show
    from optuna.importance import PedAnovaImportanceEvaluator  # the one that needs no other package

    figures = [
        show.plot_optimization_history(study, target_name=metric),
        show.plot_parallel_coordinate(study, target_name=metric),
        show.plot_slice(study, target_name=metric),
    ]
    if any(trial.intermediate_values for trial in study.trials):
        figures.insert(1, show.plot_intermediate_values(study))
    if len({trial.value for trial in study.trials if trial.state.name == "COMPLETE"}) >= ENOUGH:
        evaluator = PedAnovaImportanceEvaluator()
        figures.append(show.plot_param_importances(study, evaluator=evaluator, target_name=metric))
    pages = [figure.to_html(full_html=False, include_plotlyjs=n == 0) for n, figure in enumerate(figures)]
    name = html.escape(study.study_name)
    title = f"<title>{name}</title><h1>{name}</h1>"
    write_text(path, f'<!doctype html>\n<meta charset="utf-8">{title}\n' + "\n".join(pages))
    return None
