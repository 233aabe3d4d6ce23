"""The rehearsal of `paceline doctor` for a config with a `train_fn`, on real ranks."""

from __future__ import annotations

from pathlib import Path

from paceline.tools.doctor.checks import Finding
from paceline.tools.doctor.doctor import examine

LAB = """import torch

class Data:
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(2), 0

class Broken(Data):
    def __getitem__(self, index): raise KeyError("label")

def model(): return torch.nn.Linear(2, 2)

def train(*arguments): raise AssertionError("it was called")
"""


def rehearsed(path: Path, *overrides: str) -> Finding:
    findings = examine(path, overrides, None)
    return next(finding for finding in findings if finding.name == "rehearsal")


def test_a_train_fn_is_not_called_but_its_model_and_data_are_built_and_a_failure_names_its_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "own_lab.py").write_text(LAB)
    path = tmp_path / "config.yaml"
    path.write_text("model_fn: 'own_lab:model'\ndataset_fn: 'own_lab:Data'\ntrain_fn: 'own_lab:train'\ndevice: cpu\n")
    found = rehearsed(path)
    assert found.state == "ok", found.text
    assert "model and data were built on the CPU with 1 rank" in found.text
    assert "train_fn was not called" in found.text
    assert list(tmp_path.glob(".paceline-doctor-*")) == []

    found = rehearsed(path, "dataset_fn=own_lab:Broken")
    first, error, line, log = found.text.splitlines()
    assert (found.state, found.advice[:7]) == ("failure", "fix it,")
    assert "training" in first
    assert error.strip() == "KeyError: 'label'"
    assert line.strip() == f"at {tmp_path / 'own_lab.py'}:8"
    assert Path(log.partition("full log: ")[2]).is_file()
