"""`paceline compare`: plain training and DDP side by side, and the first difference where there is one."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import yaml


def test_plain_and_ddp_give_the_same_bits_and_one_table(run, tmp_path: Path) -> None:
    ended = run("paceline", "compare", "digits", "num_epochs=1", "--procs", "1,2,4", "--run-dir", "out")
    assert ended.returncode == 0, ended.stderr
    assert "bitwise identical weights in all 4 runs" in ended.stdout
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    rows = comparison["rows"]
    assert [row["name"] for row in rows] == ["plain", "ddp-1", "ddp-2", "ddp-4"]
    assert len({row["weights_sha256"] for row in rows}) == 1
    assert len({json.dumps([row["train_loss"], row["metrics"]]) for row in rows}) == 1
    assert rows[0]["speed_up"] == 1
    for row in rows:
        assert f"{row['samples_per_s']:,.0f}" in ended.stdout
        assert row["weights_sha256"][:12] in ended.stdout
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count("<polyline") == 4
    assert comparison["verdict"] in page


def test_a_difference_is_named_with_parameter_step_and_reason(run, tmp_path: Path) -> None:
    ended = run(
        "paceline",
        "compare",
        "digits",
        "max_steps=3",
        "exact=false",
        "lanes=4",
        "--procs",
        "1,2",
        "--run-dir",
        "out",
        timeout_s=200,
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        "the weights of ddp-2 differ from plain: with exact: false, gradients are summed in the fastest order"
        in ended.stdout
    )
    assert "differs first in " in ended.stdout
    assert ", at step 1" in ended.stdout


def test_a_random_generator_of_the_model_is_named_as_the_likely_reason(run, tmp_path: Path) -> None:
    (tmp_path / "noisy_lab.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        class Noisy(nn.Linear):
            def __init__(self):
                super().__init__(3, 2)
                self.own = torch.Generator().manual_seed(0)
            def forward(self, x):
                return super().forward(x + torch.randn(x.shape, generator=self.own))

        def get_dataset():
            x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
            return TensorDataset(x, (x.sum(1) > 0).long())
        """)
    )
    (tmp_path / "config.yaml").write_text(
        'model_fn: "noisy_lab:Noisy"\ndataset_fn: "noisy_lab:get_dataset"\nloss_fn: cross_entropy\nbatch_size: 4\n'
    )
    ended = run("paceline", "compare", "config.yaml", "--procs", "2", timeout_s=200)
    assert "most likely the model or the data uses its own random generator" in ended.stdout, ended.stderr
    assert "ddp-2 differs first in weight, at step 1" in ended.stdout


def test_wrong_numbers_of_processes_are_reported(run_here) -> None:
    for numbers, message in (
        ("1,two", "not a list of numbers"),
        ("0,1", "contains a number below 1"),
        ("3,5", "lanes=4 cannot be split over 5 ranks; set more lanes, or change --procs"),
    ):
        ended = run_here("paceline", "compare", "digits", "--procs", numbers)
        assert ended.returncode == 2
        assert message in ended.stderr


WITHOUT_RUN = """
import torch


def train(model, train_loader, val_loader, device, num_epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
"""


def test_an_own_loop_with_run_has_the_same_weights_on_any_number_of_processes(run) -> None:
    assert run("paceline", "init", "mylab").returncode == 0
    ended = run("paceline", "compare", "mylab", "num_epochs=1", "--procs", "1,2", timeout_s=200)
    assert ended.returncode == 0, ended.stderr
    assert "bitwise identical weights in all 3 runs" in ended.stdout


def test_an_own_loop_is_compared_by_time_and_its_difference_explained(run, tmp_path: Path) -> None:
    assert run("paceline", "init", "mylab").returncode == 0
    (tmp_path / "mylab" / "train.py").write_text(WITHOUT_RUN)
    without = ["lanes=null", "loss_fn=null", "metrics=null"]
    ended = run("paceline", "compare", "mylab", "num_epochs=1", *without, "--procs", "1,2", timeout_s=200)
    assert ended.returncode == 0, ended.stderr
    assert (
        "the weights of ddp-2 differ from plain: your own loop averages over the samples of each process"
        in ended.stdout
    )
    configs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/mylab-compare/*/*/config.yaml")]
    assert len(configs) == 3
    assert len({config["threads"] for config in configs}) == 1  # or the efficiency would count threads
