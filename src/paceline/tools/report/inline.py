"""The curves and the report of runs as objects that a notebook displays, without a server or other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from paceline.errors import ConfigError
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.tools.report.charts import MEASURED, Chart, charts_of
from paceline.tools.report.drawing import svg_of
from paceline.tools.report.facts import facts_of_all
from paceline.tools.report.page import page_of

PLOT_POINTS = 400  # of a curve; more than a chart has pixels across


@dataclass(frozen=True)
class Plot:
    """Curves as SVG, which a notebook displays."""

    svg: str = field(repr=False)
    names: list[str]

    def save(self, path: Path | str) -> Path:
        """Write the SVG to a file."""
        return _save(Path(path), self.svg)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f'<curves of {", ".join(self.names)}; write them with .save("curves.svg")>'


@dataclass(frozen=True)
class Report:
    """The HTML page of `paceline report`, which a notebook displays."""

    html: str = field(repr=False)
    path: Path | None  # of the page in the run folder; None if it cannot be written there

    def save(self, path: Path | str) -> Path:
        """Write the page to a file."""
        return _save(Path(path), self.html)

    def _repr_html_(self) -> str:
        """A frame with the page, so that its styles and scripts do not affect the notebook."""
        style = "width: 100%; height: 640px; border: 1px solid #8884; border-radius: 4px; resize: vertical"
        return f'<iframe title="Report" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        if self.path is None:
            return '<report; the run folder cannot be written to, write it with .save("report.html")>'
        return f"<report in {self.path}; open it in a browser>"


def plot_of(paths: Sequence[Path], names: Sequence[str] | None = None) -> Plot:
    """The curves of losses and metrics of runs, or the curves with these names."""
    runs = facts_of_all(_checked(paths), PLOT_POINTS)
    charts = charts_of(runs)
    known = [name for chart in charts for name in chart.names]
    wanted = [name for name in known if name not in MEASURED] if names is None else names
    if not wanted:
        raise ConfigError(
            f"{paths[0]} has no losses and metrics to plot; log them in your loop with run.log(loss=loss)"
        )
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"names={unknown[0]} is not a curve of {paths[0]}; choose from {', '.join(known) or 'none'}")
    kept = [Chart(chart.title, [name for name in chart.names if name in wanted]) for chart in charts]
    return Plot(svg_of(runs, [chart for chart in kept if chart.names]), list(wanted))


def report_of(paths: Sequence[Path]) -> Report:
    """The report of one run, or of several that are compared, also written into the folder of the first one."""
    html = page_of(facts_of_all(_checked(paths)))
    folder = RunFolder(paths[0])
    path = folder.report if len(paths) == 1 else folder.comparison
    try:
        write_text(path, html)
    except OSError:  # a run of another user, or a full disk; a notebook still displays the page
        return Report(html, None)
    return Report(html, path)


def _checked(paths: Sequence[Path]) -> Sequence[Path]:
    """The paths; raises ConfigError unless each is a run folder."""
    for path in paths:
        if not RunFolder(path).holds_run():
            raise ConfigError(f"{path} is not a run folder; give a result, or a folder such as runs/NAME/DATE-TIME")
    return paths


def _save(path: Path, text: str) -> Path:
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from None
    return path
