"""Notebooks in a real Jupyter kernel: functions in cells that train on two ranks, and those of the documentation."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from test_report import CHROMIUM

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "notebooks.py"))

CELLS = [
    """
import torch
from torch import nn
from torch.utils.data import Dataset
from paceline import Trainer

slope = 3.0

class Line(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        x = torch.tensor([i / 64.0])
        return x, slope * x
""",
    """
def train(model, train_loader, val_loader, device, num_epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(num_epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("trained in a cell")
    return model.module.weight.item()

result = Trainer(lambda: nn.Linear(1, 1), Line, None, train, 4, 10, procs=2).start()
print(f"slope {result.value:.2f} of {slope}")
""",
    """
managed = Trainer(lambda: nn.Linear(1, 1), Line, loss_fn=lambda output, y: ((output - y) ** 2).mean(),
                  optimizer={"name": "sgd", "lr": 0.5}, batch_size=4, num_epochs=10, procs=2).start()
print(f"slope {managed.load_model().weight.item():.2f} managed")
""",
]

MISTAKES = [
    "Trainer(nn.Linear(1, 1), Line, loss_fn='mse_loss')",
    """
def nothing(output, y):
    pass

Trainer(lambda: nn.Linear(1, 1), Line, loss_fn=nothing, procs=2).start()
""",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def forward(self, x):
        return self.layer(x)

def start():
    Trainer(Net, Line, loss_fn='mse_loss', procs=2).start()

start()
""",
    """
import paceline

class StopButton(paceline.Callback):
    def on_step(self, run, values):
        run.stop("the user")

Trainer(lambda: nn.Linear(1, 1), Line, loss_fn='mse_loss', callbacks=[StopButton()], procs=2).start()
""",
]


# zmq and jupyter's own event loop warn about themselves here.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_functions_in_cells_train_on_two_ranks_and_mistakes_show_cells_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    monkeypatch.delenv("PYTHONWARNINGS")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    cells += [nbformat.v4.new_code_cell(cell, metadata={"tags": ["raises-exception"]}) for cell in MISTAKES]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "trained in a cell" in shown
    assert float(re.search(r"slope (\S+) of 3.0", shown)[1]) == pytest.approx(3.0, abs=0.05)
    assert float(re.search(r"slope (\S+) managed", shown)[1]) == pytest.approx(3.0, abs=0.05)
    assert "\x1b[2K" not in shown  # no cursor movements where there is no cursor
    model, loss, shape, stopped = [_traceback(cell) for cell in notebook.cells[-4:]]
    assert model == [
        "Traceback (most recent call last):",
        "  Cell In[4], line 1, in <module>",
        "    Trainer(nn.Linear(1, 1), Line, loss_fn='mse_loss')",
        "ConfigError: model_fn=<Linear> is a model; give a function that returns it, such as model_fn=lambda: model",
    ]
    assert loss[-1].startswith("ConfigError: loss_fn (Cell In[5], line 1) returned None; return a mean over the batch")
    assert [line for line in shape if line.startswith("  Cell")] == [
        "  Cell In[6], line 11, in <module>", "  Cell In[6], line 9, in start"
    ]  # fmt: skip
    assert shape[-1].startswith(
        "ConfigError: layer 'layer' (Linear) gets an input of shape (6, 1), but takes 2 features"
    )
    assert shape[-1].endswith(" (Cell In[6], line 6)")
    assert stopped[1] == "  Cell In[7], line 7, in <module>"
    assert re.fullmatch(
        r"Stopped: stopped by the user at step 1; checkpoint saved; resume with --resume \S+, or with "
        r'Trainer\(…, resume="auto"\)', stopped[-1]
    )  # fmt: skip


def _traceback(cell: Any) -> list[str]:
    """The lines of the error that a cell shows."""
    [error] = [output for output in cell.outputs if output.output_type == "error"]
    return "\n".join(error.traceback).splitlines()


# --- the notebooks of the documentation -------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPT["NOTEBOOKS"], ids=lambda path: path.stem)
def test_a_notebook_of_the_documentation_runs_and_has_its_outputs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONWARNINGS")
    executed, committed = SCRIPT["executed"](path, tmp_path), nbformat.read(path, as_version=4)
    for new, old in zip(executed.cells, committed.cells, strict=True):
        assert kinds_of(new) == kinds_of(old), f"run `make notebooks`: the outputs differ of\n{new.source}"
    assert path.stat().st_size < 200_000
    plots = shown_as("image/svg+xml", executed)
    assert plots
    for plot in plots:
        lines = [
            line.get("points", "") for line in ElementTree.fromstring(plot).iter() if line.tag.endswith("}polyline")
        ]
        assert lines
        assert all(len(points.split()) > 3 for points in lines)
    if path.stem == "compare_runs":
        [report] = shown_as("text/html", executed)
        assert_that_the_report_is_drawn(report, tmp_path)


@pytest.mark.parametrize("path", SCRIPT["NOTEBOOKS"], ids=lambda path: path.stem)
def test_a_notebook_is_a_page_of_the_site_with_all_cells_and_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    page = SCRIPT["page_of"](notebook)
    for cell in notebook.cells:
        assert cell.source.replace(".ipynb)", ".md)") in page
    assert page.count("<svg ") == page.count("</svg>") == len(shown_as("image/svg+xml", notebook))
    assert all(f"<div>{shown.strip()}</div>" in page for shown in shown_as("text/html", notebook))
    assert "run folder /home/user/notebooks/runs/" in page


def kinds_of(cell: nbformat.NotebookNode) -> set[str]:
    """The kinds of outputs of a cell."""
    return {kind for output in cell.get("outputs", []) for kind in output.get("data", {output.get("name"): None})}


def shown_as(kind: str, notebook: nbformat.NotebookNode) -> list[str]:
    """The outputs of one kind."""
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [data[kind] for data in outputs if kind in data]


LOOK = """
setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument;
  const seen = {
    charts: page.querySelectorAll(".u-over").length,
    legend: page.querySelector(".u-legend").textContent,
    styles: document.styleSheets.length,
    width: document.documentElement.scrollWidth - innerWidth,
  };
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
}, 500);
"""


def assert_that_the_report_is_drawn(report: str, folder: Path) -> None:
    """Look at an output of a notebook in a browser, if there is one."""
    assert escape('"label":"lr-0.05"') in report
    if CHROMIUM is None:
        return
    (folder / "output.html").write_text(f"<body>{report}<script>{LOOK}</script></body>", encoding="utf-8")
    shown = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}",
            "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", (folder / "output.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    [text] = re.findall(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    seen: dict[str, Any] = json.loads(text)
    assert seen["charts"] >= 4
    assert all(f"lr-{lr} val_loss" in seen["legend"] for lr in ("0.02", "0.05", "0.2"))
    assert seen["styles"] == 0  # those of the report stay in the frame
    assert seen["width"] <= 0
