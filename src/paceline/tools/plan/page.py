"""The page of a plan, and its rows as text: for the page and for the terminal (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from paceline.formatting import duration, size_text
from paceline.tools.plan.forecast import Forecast
from paceline.tools.plan.model import LIMITS
from paceline.tools.plan.plan import Plan
from paceline.tools.report.charts import Chart
from paceline.tools.report.drawing import Axis, svg_of
from paceline.tools.report.facts import Curve
from paceline.tools.report.page import ASSETS

PARTS = {"compute": "compute", "loader": "waiting for samples", "network": "network", "latency": "latency"}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="sub">{about}</p>
{table}
<h2>What to change</h2>
<ul>{advice}</ul>
<h2>Curves</h2>
{svg}
<footer>Written by paceline plan. docs/plan.md explains how these figures are computed.</footer>
</main>
</body>
</html>
"""


@dataclass(frozen=True)
class Curves:
    """The curves of a plan, over the numbers of ranks."""

    label: str
    curves: dict[str, Curve]


def head_of(plan: Plan) -> list[str]:
    """The titles of the table."""
    price, deadline = plan.terms.price is not None, plan.terms.deadline_s is not None
    return [
        "ranks", "hosts", "lanes per rank", "step", "samples/s", "efficiency", "time", *(["price"] if price else []),
        *(["in time"] if deadline else []), "memory per rank", "fits", "limit",
    ]  # fmt: skip


def row_of(plan: Plan, row: Forecast) -> list[str]:
    """The cells of a row."""
    price = [] if plan.terms.price is None else ["–" if row.price is None else f"{row.price:,.2f}"]
    deadline = [] if plan.terms.deadline_s is None else [{True: "yes", False: "no", None: "–"}[row.is_in_time]]
    return [
        f"{row.ranks:,}", f"{row.hosts:,}", f"{row.lanes_per_rank:,}", f"{row.step_ms:,.4g} ms",
        f"{row.samples_per_s:,.0f}", f"{row.efficiency:.0%}",
        "–" if row.seconds is None else duration(row.seconds), *price, *deadline, size_text(row.memory_bytes),
        "yes" if row.fits else "no", f"{row.limit} {row.shares[row.limit]:.0%}",
    ]  # fmt: skip


def page_of(plan: Plan) -> str:
    """The HTML of the page: one file, which works offline."""
    measured = plan.measured
    about = " · ".join(
        [
            f"measured with {measured.concurrent} × {measured.device}, {measured.threads} threads each",
            f"link {plan.link}", f"{plan.terms.per_host} per host", f"batch_size {plan.keys.batch_size}",
            f"{len(measured.gradients)} gradients, {size_text(measured.gradient_bytes)}",
        ]
    )  # fmt: skip
    return PAGE.format(
        title=f"Plan of {escape(plan.name)}",
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        about=escape(about),
        table=_table(head_of(plan), [row_of(plan, row) for row in plan.rows]),
        advice="".join(f"<li>{escape(sentence)}</li>" for sentence in plan.advice),
        svg=svg_of([curves_of(plan.rows)], charts_of(plan.rows), Axis("ranks", is_log=True)),
    )


def curves_of(rows: Sequence[Forecast]) -> Curves:
    """The curves over the numbers of ranks."""
    values: dict[str, list[float | None]] = {
        "step, ms": [row.step_ms for row in rows],
        "efficiency": [row.efficiency for row in rows],
        "samples per second": [row.samples_per_s for row in rows],
        "hours to the end": [None if row.seconds is None else row.seconds / 3600 for row in rows],
        "price": [row.price for row in rows],
        **{PARTS[name]: [row.shares[name] * row.step_ms for row in rows] for name in LIMITS},
    }
    ranks = [row.ranks for row in rows]
    return Curves(
        "plan",
        {
            name: Curve("ranks", ranks, [0.0] * len(ranks), [value for value in column if value is not None])
            for name, column in values.items()
            if None not in column
        },
    )


def charts_of(rows: Sequence[Forecast]) -> list[Chart]:
    """The charts of the page."""
    known = curves_of(rows).curves
    single = ("step, ms", "efficiency", "samples per second", "hours to the end", "price")
    return [
        Chart("where a step goes, ms", list(PARTS.values())),
        *(Chart(name, [name]) for name in single if name in known),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th class="number">{escape(title)}</th>' for title in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
