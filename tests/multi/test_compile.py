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


STEP = """
import json

import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(2, 4), nn.Linear(4, 1)

def make_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 2, generator=generator), torch.randn(16, 1, generator=generator))

def step(model, batch):
    features = torch.tanh(model.encoder(batch[0]))
    return {"loss": (model.head(features) - batch[1]).square().mean(), "size": features.norm()}

for mode, procs in (("compile", 1), ("compile", 2), ("auto", 1)):
    result = Trainer(Net, make_data, step_fn=step, batch_size=4, lanes=2, num_epochs=2, procs=procs, val_fraction=0,
                     step_mode=mode).start()
    print(json.dumps([row[name] for row in result.history for name in ("train_loss", "train_size")]))
"""


def test_a_step_compiles_with_the_parts_of_the_model_that_it_calls(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(STEP)
    ended = run("python", "main.py", PYTHONWARNINGS="")
    assert ended.returncode == 0, ended.stderr
    alone, several, plain = map(json.loads, ended.stdout.splitlines())
    assert alone == pytest.approx(plain)
    assert several == pytest.approx(plain)
