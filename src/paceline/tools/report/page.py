"""The report page: one HTML file that contains its style, script, plotting library and data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from paceline.tools.report.charts import charts_of
from paceline.tools.report.facts import RunFacts

ASSETS = Path(__file__).parent / "assets"


def page_of(runs: Sequence[RunFacts]) -> str:
    """The HTML of a page about one run, or about several that are compared."""
    names = sorted({run.name for run in runs})
    title = f"{names[0]} {runs[0].label}" if len(runs) == 1 else f"{', '.join(names)}: {len(runs)} runs"
    return Template(_asset("template.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=_asset("uplot/uPlot.min.css") + _asset("report.css"),
        licence=_asset("uplot/LICENSE"),
        library=_asset("uplot/uPlot.iife.min.js"),
        script=_asset("report.js"),
        data=as_script({"runs": [asdict(run) for run in runs], "charts": [asdict(chart) for chart in charts_of(runs)]}),
    )


def as_script(data: Any) -> str:
    """JSON that is safe inside a script element, for any strings in it."""
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    """The same data with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
