"""A script with a mistake: what it shows, and how it ends."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Trainer

def data():
    return TensorDataset(torch.zeros(8, 4), torch.arange(8) % 2 + 1)

def main():
    Trainer(lambda: nn.Linear(4, 2), data, loss_fn="cross_entropy", device="cpu", procs=2).start()

if __name__ == "__main__":
    main()
"""


def test_a_mistake_that_a_rank_finds_ends_the_script_with_code_2_and_the_lines_of_the_script(
    run, tmp_path: Path
) -> None:
    path = tmp_path / "main.py"
    path.write_text(SCRIPT)
    ended = run("python", "main.py")
    assert ended.returncode == 2
    shown = [line for line in ended.stderr.splitlines() if "^^^" not in line]
    assert shown[0].startswith("run: 2 ranks on cpu")
    assert shown[1:] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 14, in <module>',
        "    main()",
        f'  File "{path}", line 11, in main',
        '    Trainer(lambda: nn.Linear(4, 2), data, loss_fn="cross_entropy", device="cpu", procs=2).start()',
        "ConfigError: a target is class 2, but the model's output of shape (4, 2) has 2 classes, numbered from 0 to 1; "
        f"subtract 1 from the targets if they are numbered from 1, else give the last layer of the model 3 outputs "
        f"({path}:7)",
    ]
