"""`paceline report` in a real browser: the page loads without an error, and it shows the numbers of the events."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
WEIGHTS = "0123456789abcdef" * 4

# Mouse actions of a user; what the page shows after them is written into the page for the test to read.
ACTS = """
const seen = {};
const charts = () => [...document.querySelectorAll(".u-over")];
const wait = () => new Promise((done) => setTimeout(done, 50));
function mouse(kind, x, over = charts()[0], target = over) {
  const box = over.getBoundingClientRect();
  const place = { clientX: box.left + x * box.width, clientY: box.top + 20, movementX: 1, movementY: 1 };
  target.dispatchEvent(new MouseEvent(kind, { bubbles: true, ...place }));
}
const legends = () => [...document.querySelectorAll(".u-legend")].map((legend) =>
  Object.fromEntries([...legend.querySelectorAll(".u-series")].map((row) =>
    [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent])));
async function hover(x) { mouse("mouseenter", x); mouse("mousemove", x); await wait(); return legends(); }
async function act() {
  seen.titles = [...document.querySelectorAll("h3")].map((title) => title.firstChild.textContent);
  seen.before = legends();
  seen.hovered = await hover(0.5);
  mouse("mousedown", 0.5); mouse("mousemove", 0.9); mouse("mouseup", 0.9, charts()[0], document);
  await wait();
  seen.zoomed = await hover(0.001);
  document.querySelectorAll(".axis button")[1].click();
  await wait();
  seen.overTime = await hover(0.5);
  const strip = document.querySelector("canvas[style]"), box = strip.getBoundingClientRect();
  const right = { clientX: box.right - 2, clientY: box.bottom - 4 };
  strip.dispatchEvent(new MouseEvent("mousemove", right));
  seen.strip = document.querySelector("output").textContent;
  const hue = strip.getContext("2d").getImageData(strip.width - 2, strip.height - 6, 1, 1).data;
  seen.isStragglerMarked = hue[0] > hue[2];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const parts = (selector, read) => all(selector).map((whole) => [...whole.children].map(read));
  seen.bars = parts(".bar", (part) => part.getBoundingClientRect().width);
  seen.phases = parts(".phases tbody tr", (cell) => cell.textContent);
  seen.wider = document.documentElement.scrollWidth - innerWidth;
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
}
setTimeout(act, 100);
"""


def write_run(path: Path, *, lr: float, every: int = 10) -> list[dict[str, Any]]:
    """Write a run of 3 ranks with 50 step events, in the last of which rank 2 is late; returns its events."""
    started = {"name": "lab <b>", "seed": 0, "world_size": 3, "lanes": 3, "device": "cpu", "backend": "gloo"}
    events: list[dict[str, Any]] = [{"event": "run_started", **started}]
    for number in range(1, 51):
        late = 40.0 if number == 50 else 10.0
        events.append(
            {
                "event": "step", "step": every * number, "steps": 500, "epoch": 1, "epochs": 1, "lr": lr,
                "loss": 1 / (3 + number * lr), "samples_per_s": 1000.0 + number, "grad_norm": None,
                "step_ms": [50.0, 50.0, 50.0], "memory_mb": [50.0, 51.0, 52.0],
                "phase_ms": {
                    "data": [1.0, 1.5, late - 9], "forward": [9.0] * 3, "reduction": [40.0, 39.5, 50.0 - late],
                },
            }
        )  # fmt: skip
    events.append({"event": "checkpoint", "step": 500, "bytes": 1_000_000, "seconds": 0.1})
    metrics = {"val_loss": 0.123456, "accuracy": 0.75}
    events.append({"event": "epoch", "epoch": 1, "step": 500, "train_loss": 0.2, **metrics})
    events.append({"event": "run_finished", "step": 500, "epoch": 1, "metrics": metrics})
    runs.write_run(path, *events, config=f"name: lab\noptimizer:\n  lr: {lr}\n")
    facts = {
        "step": 100,
        "ema_sha256": None,
        "metrics": metrics,
        "seconds": 50.0,
        "samples": 500,
        "weights_sha256": WEIGHTS,
    }
    path.joinpath("result.json").write_text(json.dumps(facts))
    return events


def browse(page: Path, *, width: int = 1200) -> tuple[str, dict[str, Any]]:
    """The HTML of the page, and what it shows after the mouse actions; fails on an error in the console."""
    assert CHROMIUM is not None
    copy = page.with_suffix(".acts.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{ACTS}</script></body>"))
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}",
            "--enable-logging=stderr", f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    dom = re.sub(r"<script.*?</script>|<style.*?</style>", "", done.stdout, flags=re.DOTALL)
    [seen] = re.findall(r'<pre id="seen">(.*?)</pre>', dom)
    return dom, json.loads(seen)


def number(text: str) -> float:
    return float(text.replace(",", ""))


@needs_browser
def test_the_page_of_a_run_shows_its_numbers_and_reacts_to_the_mouse(run, tmp_path: Path) -> None:
    events = write_run(tmp_path / "one", lr=0.5)
    ended = run("paceline", "report", "one", "--out", "page.html")
    assert ended.returncode == 0, ended.stderr
    dom, seen = browse(tmp_path / "page.html", width=400)

    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert seen["titles"][:4] == ["loss", "accuracy", "learning rate", "samples per second"]
    assert [number(seen["before"][0][name]) for name in ("step", "val_loss")] == [500, 0.12346]
    loss, *_, speed, _ = seen["hovered"]
    here = number(loss["step"])
    assert 200 < here < 300
    assert number(loss["loss"]) == float(f"{steps[here]['loss']:.5g}")
    assert number(speed["samples_per_s"]) == steps[here]["samples_per_s"]  # all charts follow one mouse
    assert abs(number(seen["zoomed"][0]["step"]) - here) <= 10  # what was in the middle is at the left
    assert seen["overTime"][0]["time"].endswith(" s")
    assert seen["strip"] == "step 500, rank 2: 40 ms, a straggler"
    assert seen["isStragglerMarked"]
    # Rank 2's data: 1 ms in 490 steps, 31 in the last 10.
    assert [[row[0], *row[2:]] for row in seen["phases"]] == [
        ["data", "1.3667", "2.7 %"], ["forward", "9", "18.0 %"], ["reduction", "39.633", "79.3 %"],
    ]  # fmt: skip
    data, forward, reduction = seen["bars"][2]
    assert (data / forward, reduction / forward) == (
        pytest.approx(1.6 / 9, rel=0.01),
        pytest.approx(39.4 / 9, rel=0.01),
    )
    assert seen["wider"] <= 0  # nothing to scroll sideways on a telephone
    for text in (
        "0.12346",
        "0.75",
        WEIGHTS[:12],
        WEIGHTS,
        "lab &lt;b&gt;",
        "rank 2 at 1 of 50 points",
        "1.0 MB in 0.1 s",
    ):
        assert text in dom


@needs_browser
def test_several_runs_are_compared_in_a_table_and_in_one_chart(run, tmp_path: Path) -> None:
    written = {
        "a": write_run(tmp_path / "runs" / "a", lr=0.5),
        "b": write_run(tmp_path / "runs" / "b", lr=0.25, every=7),
    }
    ended = run("paceline", "report", "runs/a", "runs/b")
    assert ended.returncode == 0, ended.stderr
    dom, seen = browse(tmp_path / "report.html")
    assert set(seen["hovered"][0]) == {"step", "a loss", "b loss", "a val_loss", "b val_loss"}
    for name, events in written.items():  # their steps differ; each shows a number of its own, one near the mouse
        near = [
            e["loss"]
            for e in events
            if e["event"] == "step" and abs(e["step"] - number(seen["hovered"][0]["step"])) <= 5
        ]
        assert number(seen["hovered"][0][f"{name} loss"]) in {float(f"{loss:.5g}") for loss in near}
    assert "bitwise identical weights: all" in dom
    assert re.search(r"optimizer\.lr</code></td><td[^>]*>0\.5</td><td[^>]*>0\.25", dom)


def test_a_folder_without_a_run_is_named(run, tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    ended = run("paceline", "report", "empty")
    assert ended.returncode == 2
    assert "empty is not a run folder" in ended.stderr
