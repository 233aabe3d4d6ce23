"""Compiled steps: functions of scripts and of cells, one hash on any number of ranks, and the decision of auto."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
    ended = run("python", "main.py")
    assert ended.returncode == 0, ended.stderr
    compiled, plain = map(json.loads, ended.stdout.splitlines())
    assert compiled == pytest.approx(plain)


STEP = """
import json

import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Trainer
from paceline.engine import compilation, compile_gain, objective

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        objective.PART_BYTES = 40  # so that it is compiled in two parts, as a large model
        self.encoder, self.norm, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

def make_profitable():
    compilation.DEVICES, compile_gain.SAVED_S_PER_BYTE = ("cpu",), 1.0  # as on a GPU with a large model
    return Net()

def make_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(38, 2, generator=generator), torch.randn(38, 1, generator=generator))

def step(model, batch):
    features = nn.functional.dropout(torch.tanh(model.norm(model.encoder(batch[0]))), 0.3)
    return {"loss": (model.head(features) - batch[1]).square().mean(), "size": features.norm()}

def train(procs, step_mode, model_fn=Net, num_epochs=4, **options):
    result = Trainer(model_fn, make_data, step_fn=step, batch_size=4, lanes=4, num_epochs=num_epochs, procs=procs,
                     val_fraction=0, step_mode=step_mode, **options).start()
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    lines = [event["text"] for event in events if event["event"] == "step_mode"]
    print(json.dumps([result.weights_sha256, [row["train_size"] for row in result.history], lines]))

train(1, "compile")
train(1, "eager")
train(3, "auto", make_profitable, num_epochs=2, run_dir="resized")
train(2, "auto", resume="resized")
"""


def test_compiled_runs_have_one_hash_and_auto_keeps_its_decision_when_it_resumes(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(STEP)
    ended = run("python", "main.py", PACELINE_HOME="home")
    assert ended.returncode == 0, ended.stderr
    compiled, eager, begun, resized = (json.loads(line) for line in ended.stdout.splitlines() if line[:2] == '["')
    assert resized[:2] == compiled[:2]  # on other numbers of ranks, where lanes of a short step run eagerly
    assert eager[0] != compiled[0]  # other numbers for dropout: the runs above were indeed compiled
    assert begun[2][0].startswith("step_mode: auto compiles the step, which takes about")
    assert begun[2][1].startswith("the step is compiled")
    [cache] = (tmp_path / "home" / "compiled").iterdir()
    assert f"torch-{torch.__version__}" in cache.name
    assert any(cache.iterdir())
