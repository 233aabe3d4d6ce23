"""`plot` and `report` of results: curves as SVG and a report in a frame, drawn from run folders. No rank is started."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.results.load import TrainedRun
from paceline.tools.report.drawing import COLOURS, ticks
from paceline.tools.report.inline import Plot, plot_of, report_of
from support.runs import write_run

SVG = "{http://www.w3.org/2000/svg}"


def step(number: int, loss: float, **values: float) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "steps": 9,
        "epoch": 1,
        "epochs": 1,
        "loss": loss,
        "lr": 0.1,
        "values": values,
    }


def epoch(number: int, step: int, **metrics: float) -> dict[str, Any]:
    return {"event": "epoch", "epoch": number, "step": step, "train_loss": 0.5, **metrics}


def trained(path: Path, *events: dict[str, Any]) -> TrainedRun:
    """A run in a folder with these events."""
    run_dir = write_run(path, *events).path
    return TrainedRun(run_dir=run_dir, source=run_dir, origin="", step=1, metrics={}, lanes=1)


def drawn(plot: Plot) -> dict[str, tuple[str, list[tuple[float, float]]]]:
    """For each curve the text that describes it, and its colour and points."""
    found = {}
    for group in ElementTree.fromstring(plot._repr_svg_()).iter(f"{SVG}g"):
        line = group.find(f"{SVG}polyline")
        assert line is not None
        points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        found[group.findtext(f"{SVG}title", "")] = (group.get("stroke", ""), points)
    return found


def texts(plot: Plot) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]


EVENTS = [
    step(1, 2.0),
    step(2, 1.0),
    step(4, 0.5),
    epoch(1, 2, val_loss=1.5, accuracy=0.25),
    epoch(2, 4, val_loss=0.75, accuracy=0.5),
]


def test_a_plot_has_the_losses_and_metrics_at_their_steps(tmp_path: Path) -> None:
    plot = trained(tmp_path / "r", *EVENTS).plot()
    assert plot.names == ["loss", "val_loss", "accuracy"]
    curves = drawn(plot)
    assert list(curves) == ["loss: 0.5 at step 4", "val_loss: 0.75 at step 4", "accuracy: 0.5 at step 4"]
    (_, loss), (_, val_loss), (_, accuracy) = curves.values()
    # Steps 1, 2, 4 and losses 2, 1, 0.5: the positions are in proportion, and y grows downwards.
    assert loss[2][0] - loss[0][0] == pytest.approx(3 * (loss[1][0] - loss[0][0]), abs=0.3)
    assert loss[2][1] - loss[0][1] == pytest.approx(1.5 * (loss[1][1] - loss[0][1]), abs=0.3)
    assert [x for x, _ in val_loss] == [loss[1][0], loss[2][0]]
    assert accuracy[0][1] > accuracy[1][1]
    assert len({colour for colour, _ in curves.values()}) == 2  # accuracy has a chart of its own
    assert {"loss", "val_loss", "accuracy", "step"} <= set(texts(plot))


def test_names_choose_the_curves(tmp_path: Path) -> None:
    run = trained(tmp_path / "r", *EVENTS)
    assert list(drawn(run.plot(names=["lr"]))) == ["lr: 0.1 at step 4"]
    assert "learning rate" in texts(run.plot(names=["lr"]))
    with pytest.raises(ConfigError, match=r"names=acc is not a curve of .*; choose from loss, val_loss, accuracy, lr"):
        run.plot(names=["acc"])


def test_several_runs_are_drawn_together_with_a_colour_for_each(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", *EVENTS), trained(tmp_path / "two", step(1, 3.0), step(9, 0.25))
    curves = drawn(one.plot(two, str(tmp_path / "one")))  # each run once
    assert curves["one loss: 0.5 at step 4"][0] == curves["one accuracy: 0.5 at step 4"][0] == COLOURS[0]
    assert curves["two loss: 0.25 at step 9"][0] == COLOURS[1]
    assert len(curves) == 4
    assert {"one", "two"} <= set(texts(one.plot(two.run_dir)))


def test_a_single_point_equal_values_and_any_name_can_be_drawn(tmp_path: Path) -> None:
    plot = trained(tmp_path / "r", step(5, 0.0, **{"<b> & \"x'": 7.0})).plot()
    curves = drawn(plot)
    assert set(curves) == {"loss: 0 at step 5", "<b> & \"x': 7 at step 5"}
    assert all(len(points) == 1 for _, points in curves.values())
    assert "nan" not in plot.svg
    assert plot.svg.count("<circle") == 2


def test_a_long_run_has_a_small_plot(tmp_path: Path) -> None:
    plot = trained(tmp_path / "r", *(step(n, 1 / n) for n in range(1, 5001))).plot()
    [(_, points)] = drawn(plot).values()
    assert 200 <= len(points) <= 400
    assert len(plot.svg) < 10_000


def test_a_run_without_numbers_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no losses and metrics to plot; log them in your loop with run\.log"):
        trained(tmp_path / "r", {"event": "run_finished", "step": 3}).plot()


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    run = trained(tmp_path / "r", *EVENTS)
    for method in (run.plot, run.report):
        with pytest.raises(ConfigError, match=r"nowhere is not a run folder; give a result, or a folder such as"):
            method(tmp_path / "nowhere")


def test_a_plot_is_saved(tmp_path: Path) -> None:
    plot = plot_of([write_run(tmp_path / "r", *EVENTS).path])
    assert plot.save(tmp_path / "curves.svg").read_text() == plot.svg
    assert repr(plot) == '<curves of loss, val_loss, accuracy; write them with .save("curves.svg")>'
    with pytest.raises(ConfigError, match=r"a/b\.svg cannot be written: No such file or directory; choose another"):
        plot.save("a/b.svg")


def test_a_report_is_in_a_frame_and_in_the_run_folder(tmp_path: Path) -> None:
    run = trained(tmp_path / "r", *EVENTS)
    report = run.report()
    assert report.path == run.run_dir / "report.html"
    assert report.path.read_text() == report.html
    assert repr(report) == f"<report in {report.path}; open it in a browser>"
    [inner] = re.findall(r'^<iframe [^<>]*srcdoc="([^"]*)"></iframe>$', report._repr_html_())
    assert unescape(inner) == report.html
    assert report.save(tmp_path / "copy.html").read_text() == report.html


def test_a_report_of_several_runs_leaves_that_of_the_single_run(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", *EVENTS), trained(tmp_path / "two", *EVENTS)
    single, several = one.report(), one.report(two)
    assert several.path == one.run_dir / "comparison.html"
    assert '"label":"two"' in several.html
    assert single.path is not None
    assert '"label":"two"' not in single.path.read_text()


def test_a_report_that_cannot_be_written_is_shown_nevertheless(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", *EVENTS)
    folder.report.mkdir()
    report = report_of([folder.path])
    assert report.path is None
    assert "iframe" in report._repr_html_()
    assert 'write it with .save("report.html")' in repr(report)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_a_few_round_numbers_within_the_limits(low: float, size: float) -> None:
    high = low + size
    if high - low < 1e-9 * abs(low):
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    margin = 1e-9 * max(abs(low), abs(high))
    assert low - margin <= found[0] < found[-1] <= high + margin
