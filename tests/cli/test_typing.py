"""What an editor sees: a user's script passes pyright in strict mode, and runs; mistakes are marked at their lines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "support" / "project"
SETTINGS = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "include": ["."]}


def test_a_script_passes_strict_checks_and_mistakes_are_marked(tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(SETTINGS))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    ended = subprocess.run([*command, "--project", str(tmp_path)], capture_output=True, text=True, check=False)
    marked = json.loads(ended.stdout)["generalDiagnostics"]
    assert [found for found in marked if not found["file"].endswith("mistakes.py")] == []
    lines = (PROJECT / "mistakes.py").read_text(encoding="utf-8").splitlines()
    wrong = [number for number, line in enumerate(lines) if "  # " in line]
    assert sorted({found["range"]["start"]["line"] for found in marked}) == wrong


def test_the_script_runs(run, tmp_path: Path) -> None:
    ended = run("python", str(PROJECT / "main.py"))
    assert ended.returncode == 0, ended.stderr
    assert "did you mean cross_entropy?" in ended.stdout
    assert (tmp_path / "managed" / "result.json").exists()
