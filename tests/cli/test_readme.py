"""The first program of the README runs as it is, to the same weights on any number of processes."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


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
