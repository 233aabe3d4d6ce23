"""A notebook: functions that live in cells, started on two ranks by a real Jupyter kernel."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

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


# zmq and jupyter's own event loop warn about themselves here.
@pytest.mark.filterwarnings("ignore")
def test_functions_in_cells_train_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.delenv("PYTHONWARNINGS")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "trained in a cell" in shown
    assert float(re.search(r"slope (\S+) of 3.0", shown)[1]) == pytest.approx(3.0, abs=0.05)
    assert float(re.search(r"slope (\S+) managed", shown)[1]) == pytest.approx(3.0, abs=0.05)
    assert "\x1b[2K" not in shown  # no cursor movements where there is no cursor
