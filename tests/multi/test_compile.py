"""step_mode: compile, with functions that no module holds: of the script itself, and made without a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = """
import json

import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Trainer

SCALE = 2.0

def scaled(x):
    return torch.tanh(x) * SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return scaled(self.layer(x))

def make_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(8, 2, generator=generator), torch.randn(8, 1, generator=generator))

exec('''  # as in the cell of a notebook
def loss_fn(output, target):
    return torch.mean((output - target) ** 2) * (SCALE if __name__ else 0)
''')

for mode in ("compile", "auto"):
    result = Trainer(lambda: Net(), make_data, loss_fn=loss_fn, batch_size=4, num_epochs=2, procs=1, val_fraction=0,
                     step_mode=mode).start()
    print(json.dumps([row["train_loss"] for row in result.history]))
"""


def test_functions_of_the_script_and_of_cells_compile(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    ended = run("python", "main.py", PYTHONWARNINGS="")  # torch's own compiler uses what torch has deprecated
    assert ended.returncode == 0, ended.stderr
    compiled, plain = map(json.loads, ended.stdout.splitlines())
    assert compiled == pytest.approx(plain)
