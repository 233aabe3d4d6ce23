"""The first program of the README and the programs of the start pages run as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_first_program_gives_the_same_weights_and_metrics_on_1_and_2_processes(run, tmp_path: Path) -> None:
    program = README.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    assert "train(model, train_loader, val_loader, device, num_epochs, run)" in program
    printed = []
    for procs in ("1", "2"):
        (tmp_path / "program.py").write_text(program.replace("procs=2", f"procs={procs}"))
        ended = run("python", "program.py")
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout.splitlines()[-1])
    assert printed[0] == printed[1]
    assert re.fullmatch(r"\{'accuracy': \d\.\d+\} [0-9a-f]{64}", printed[0])


def test_the_cells_of_the_start_pages_run(run, tmp_path: Path) -> None:
    pages = [ROOT / "docs" / name for name in ("index.md", "start_notebook.md")]
    cells = [re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages]
    assert [len(each) for each in cells] == [1, 3]
    tmp_path.joinpath("cells.py").write_text("\n".join([cell for each in cells for cell in each]))
    ended = run("python", "cells.py")
    assert ended.returncode == 0, ended.stderr
    hashed, metrics, _, _, evaluated = ended.stdout.splitlines()
    assert re.fullmatch(r"\{'val_loss': \d\.\d+\} [0-9a-f]{64}", hashed)
    assert metrics == evaluated
    assert "'accuracy': 0.9" in metrics
